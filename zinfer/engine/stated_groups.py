"""Compares groups of ranks that a program has made itself with those of the mesh."""

from collections.abc import Sequence

from zinfer.config import Settings
from zinfer.errors import ConfigError
from zinfer.ranks.mesh import Mesh, Mode


def check_groups(mesh: Mesh, rank: int, settings: Settings) -> None:
    """Raise ConfigError unless the stated groups are a rank's sub-groups of the mesh, in the same order."""
    tensor, experts = settings.tensor_parallel.group, settings.expert_groups
    if tensor is not None:
        _check(
            mesh, "tensor", rank, tensor.ranks, ("tensor_parallel.tp_group (mpu)", "layers", "tensor_parallel.tp_size")
        )
    if experts.dividing is not None:
        _check(mesh, "expert", rank, experts.dividing.ranks, ("moe.ep_group", "experts", "moe.ep_size"))
    alike = mesh.ranks_in(("replicas", "pipeline", "zero", "tensor"), rank)
    if experts.alike is not None and experts.alike.ranks != alike:
        raise ConfigError(
            f"moe.ep_mp_group has the ranks {list(experts.alike.ranks)}, but the ranks {list(alike)} have the experts "
            f"of rank {rank}; make such groups, or remove the key"
        )


def _check(mesh: Mesh, mode: Mode, rank: int, stated: Sequence[int], told: tuple[str, str, str]) -> None:
    own, (key, what, size_key) = mesh.ranks_along(mode, rank), told
    if own != tuple(stated):
        step = own[1] - own[0] if len(own) > 1 else 1
        way = "follow one another" if step == 1 else f"are {step} apart, the size of tensor_parallel.tp_size"
        raise ConfigError(
            f"{key} has the ranks {list(stated)}, but rank {rank} divides {what} with the ranks {list(own)}: those of "
            f"a group {way}; make groups of {mesh.sizes[mode]} such ranks, or give {size_key}"
        )
