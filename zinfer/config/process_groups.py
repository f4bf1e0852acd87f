"""Groups of ranks that a program has made itself: process groups of torch, or an `mpu`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from zinfer.config.values import Refused, Unusable

_METHODS: Final = ("get_model_parallel_world_size", "get_model_parallel_rank", "get_model_parallel_group")


@dataclass(frozen=True)
class GroupRanks:
    """The ranks of a group, this process's among them, in their order in the group."""

    ranks: tuple[int, ...]


def process_group(value: object) -> GroupRanks:
    """Parse a process group of torch.distributed that this process is in."""
    import torch.distributed as dist

    if not isinstance(value, dist.ProcessGroup):
        raise Unusable("a process group of torch.distributed that this process is in")
    return GroupRanks(tuple(dist.get_process_group_ranks(value)))


def expert_group(value: object) -> GroupRanks | None:
    """Parse a process group, or a mapping to it from the number of ranks, as DeepSpeed keeps it; None if empty."""
    if not isinstance(value, Mapping):
        return process_group(value)
    found = {process_group(each) for each in value.values() if each is not None}
    if len(found) > 1:
        raise Unusable("one process group, because all mixtures of a model are divided alike")
    return found.pop() if found else None


def parallel_unit(value: object) -> GroupRanks | None:
    """Parse an object with Megatron's functions; None if its group is one process alone."""
    import torch.distributed as dist

    if not all(callable(getattr(value, name, None)) for name in _METHODS):
        raise Unusable(f"an object with {', '.join(_METHODS)}")
    size, rank, group = (getattr(value, name)() for name in _METHODS)
    if not dist.is_initialized():
        if size == 1:
            return None
        raise Refused(
            "its group is one of torch.distributed, which this process has not joined; call init_process_group first, "
            "or give tensor_parallel.tp_size instead"
        )
    found = process_group(dist.group.WORLD if group is None else group)
    if len(found.ranks) != size or found.ranks.index(dist.get_rank()) != rank:
        raise Refused(
            f"its group has the ranks {list(found.ranks)}, but it says that this process, rank {dist.get_rank()}, is "
            f"number {rank} of {size} there; make its three functions agree, or give tensor_parallel.tp_size instead"
        )
    return found


def unsplit(value: object) -> None:
    """Parse `training_mp_size`, which states nothing if it is 1."""
    if value not in (1, "1") or isinstance(value, bool):
        raise Refused(
            "says that as many ranks of training wrote the checkpoint, each its part of every matrix, and such parts "
            "are not joined here; join them with the tool of the training (Megatron's converter to Hugging Face's "
            "format), and remove the key. How many ranks run the model is tensor_parallel.tp_size"
        )
