"""Lets replicas make the same passes, as the ranks of one model do, so that each rank of a test has the whole model."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch

from zinfer.ranks.mesh import Mesh


@contextmanager
def keeping_step(size: int) -> Iterator[None]:
    """Let each ``size`` neighbouring replicas make the same passes, as the ranks of one model do."""

    def ranks_in_step(mesh: Mesh, rank: int) -> tuple[int, ...]:
        first = rank // size * size
        return tuple(range(first, first + size))

    with patch.object(Mesh, "ranks_in_step", ranks_in_step):
        yield


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread: several wait for one another, which takes long beside other processes."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def keep_step(size: int) -> None:
    """As `keeping_step`, for the rest of this process."""
    keeping_step(size).__enter__()
