"""Times GPU work without Python's launch time, with weights that are read from memory and not from the cache."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final

import torch

Call = Callable[[], object]

_COPY_BYTES: Final = 1 << 30
_FEWEST_CALLS: Final = 4  # in a graph: its own start is then shared by several


def graph_seconds(calls: Sequence[Call], replays: int = 15) -> float:
    """Seconds of one call on the device: the median over replays of a CUDA graph that holds all of them, in turn."""
    rounds = math.ceil(_FEWEST_CALLS / len(calls))
    for call in calls:
        call()  # compiles; a graph cannot
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in [*calls] * rounds:
            call()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 2)]  # type: ignore[no-untyped-call]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    times_ms: list[float] = [begin.elapsed_time(end) for begin, end in pairwise(marks[1:])]
    return statistics.median(times_ms) / 1e3 / rounds / len(calls)


def call_seconds(calls: Sequence[Call], rounds: int = 10) -> float:
    """Seconds of one call as Python makes it, one after the other: the longer of asking and doing."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    begin_s = time.perf_counter()
    for _ in range(rounds):
        for call in calls:
            call()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin_s) / rounds / len(calls)


def num_copies(nbytes: int) -> int:
    """So many copies of a matrix, used in turn, leave nothing of one in the L2 cache until it is its turn again."""
    cache_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    return max(2, 1 + math.ceil(3 * cache_bytes / nbytes))


def copy_bytes_per_s() -> float:
    """Bytes read and written a second by a kernel that copies: what a memory-bound kernel is measured against.

    `torch.Tensor.copy_` would become a memory copy in the graph, which the driver gives to slower engines.
    """
    source = torch.zeros(_COPY_BYTES // 4, dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    return 2 * _COPY_BYTES / graph_seconds([lambda: torch.neg(source, out=target)])
