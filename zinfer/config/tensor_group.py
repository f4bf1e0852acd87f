"""The ranks that divide layers, where a program has made groups itself: an `mpu`, or a process group of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch.distributed as dist

from zinfer.config.values import Refused, Unusable

_METHODS: Final = ("get_model_parallel_world_size", "get_model_parallel_rank", "get_model_parallel_group")


@dataclass(frozen=True)
class TensorGroup:
    """Ranks that divide each layer, this process's among them, in their order in the group."""

    ranks: tuple[int, ...]


def process_group(value: object) -> TensorGroup:
    """Parse a process group of torch.distributed that this process is in."""
    if not isinstance(value, dist.ProcessGroup):
        raise Unusable("a process group of torch.distributed that this process is in")
    return TensorGroup(tuple(dist.get_process_group_ranks(value)))


def parallel_unit(value: object) -> TensorGroup | None:
    """Parse an object with Megatron's functions; None if its group is one process alone."""
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
