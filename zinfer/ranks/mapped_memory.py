"""Host memory that the ranks of one host map from each other: what `peer_memory` is for their GPUs."""

import mmap
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch


class MappedMemory:
    """Memory of the same size on every rank; made on all of them in the same order.

    Args:
        nbytes: of each rank's.
        exchange: returns the value of every rank, in their order.
        place: of this rank among them.

    Raises:
        OSError: it cannot be mapped.
    """

    def __init__(self, nbytes: int, exchange: Callable[[Any], Sequence[Any]], place: int) -> None:
        descriptor = os.memfd_create("zinfer-ranks")
        try:
            os.ftruncate(descriptor, nbytes)
            paths = exchange(f"/proc/{os.getpid()}/fd/{descriptor}")
            self._views = [_map(path, nbytes) for path in paths]
            exchange(None)  # all have opened it
        finally:
            os.close(descriptor)
        self.own = self._views[place]

    def of(self, rank: int) -> torch.Tensor:
        """A rank's memory (uint8), by its place."""
        return self._views[rank]


def _map(path: str, nbytes: int) -> torch.Tensor:
    descriptor = os.open(path, os.O_RDWR)
    try:
        return torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=torch.uint8)
    finally:
        os.close(descriptor)
