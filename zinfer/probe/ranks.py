"""Measure what several ranks reach at once: their links, gathers of slabs and sums, each as a run does them.

All ranks call `measure_ranks` together. Without CUDA the links are copies in host memory and the exchanges are gloo's.
"""

import re
import statistics
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Final, Literal

import torch

from zinfer.offload.host_memory import HostBuffer
from zinfer.probe.measure import Measured, settle
from zinfer.probe.sizes import Sizes
from zinfer.ranks.model_ranks import ModelRanks
from zinfer.ranks.numa import gpu_node

_COPIES: Final = 4  # in a row, so that ranks which begin some microseconds apart are busy at once
_MOST_SECONDS: Final = 20.0
_COLOURS: Final = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class RankRates:
    """What some ranks reach at once.

    Attributes:
        num_ranks, num_hosts: that took part, in equal parts.
        backend: of the exchanges.
        nbytes: of the tensors that were exchanged.
        to_device_bytes_per_s: all links of a host together, each rank copying from its own host memory.
        gather_bytes_per_s: slabs made whole on every rank.
        all_reduce_bytes_per_s: tensors summed up over the ranks.
        nodes: NUMA node of each rank's GPU; None if unknown.
        joined_by: how the GPUs of rank 0's host are joined, pair by pair as in `nvidia-smi topo -m`, such as NV18 or
            PIX; empty if it does not say.
    """

    num_ranks: int
    num_hosts: int
    backend: Literal["nccl", "gloo"]
    nbytes: int
    to_device_bytes_per_s: Measured
    gather_bytes_per_s: Measured
    all_reduce_bytes_per_s: Measured
    nodes: tuple[int | None, ...]
    joined_by: tuple[tuple[str, ...], ...]


def measure_ranks(ranks: ModelRanks, device: torch.device, sizes: Sizes) -> RankRates:
    """Measure the links, gathers and sums of all ranks at once; the same figures on each.

    Args:
        ranks: all of them share slabs.
        device: of this rank.
        sizes: ``link_bytes`` and ``repeats``.

    Raises:
        RankError: a rank failed.
    """
    num_ranks, num_hosts = ranks.partition.size, len(set(ranks.group.hosts))
    sums = ranks.communicator(("zero",))
    nbytes = min(ranks.exchange(sizes.link_bytes))
    slab = ranks.allocate(ranks.partition.gathered_bytes(nbytes))  # as slots are
    summed = torch.zeros(nbytes // 4, dtype=torch.float32, device=device)
    with ExitStack() as owned:
        host = owned.enter_context(closing(HostBuffer(nbytes, pin=device.type == "cuda")))
        owned.callback(settle, [device])  # never unpin memory while a copy runs

        def push() -> None:
            for _ in range(_COPIES):
                slab[:nbytes].copy_(host.tensor, non_blocking=True)

        push_s = _seconds_together(push, ranks, device, sizes.repeats)
        gather_s = _seconds_together(lambda: ranks.gather(slab), ranks, device, sizes.repeats)
        reduce_s = _seconds_together(lambda: sums.all_reduce(summed), ranks, device, sizes.repeats)
    return RankRates(
        num_ranks=num_ranks,
        num_hosts=num_hosts,
        backend="nccl" if device.type == "cuda" else "gloo",
        nbytes=nbytes,
        to_device_bytes_per_s=num_ranks // num_hosts * _COPIES * nbytes / push_s,
        gather_bytes_per_s=slab.nbytes / gather_s,
        all_reduce_bytes_per_s=summed.nbytes / reduce_s,
        nodes=tuple(ranks.exchange(gpu_node(device))),
        joined_by=ranks.exchange(query_topology() if device.type == "cuda" and ranks.group.rank == 0 else ())[0],
    )


def _seconds_together(work: Callable[[], object], ranks: ModelRanks, device: torch.device, repeats: int) -> float:
    """Return the seconds until the slowest rank is done: the median of ``repeats`` after one warm-up."""
    found = []
    for number in range(repeats + 1):
        settle([device])
        ranks.exchange(number)
        begin_s = time.perf_counter()
        work()
        settle([device])
        found.append(max(ranks.exchange(time.perf_counter() - begin_s)))
    return statistics.median(found[1:])


def query_topology() -> tuple[tuple[str, ...], ...]:
    """Return how the GPUs of this host are joined, from nvidia-smi; empty if it does not say."""
    try:
        answer = subprocess.run(
            ["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=_MOST_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    return parse_topology(answer.stdout)


def parse_topology(text: str) -> tuple[tuple[str, ...], ...]:
    """Parse the matrix of `nvidia-smi topo -m`: a row for each GPU, with what joins it to each; X for itself."""
    lines = (_COLOURS.sub("", line) for line in text.splitlines())
    rows = [line.split() for line in lines if re.match(r"GPU\d", line)]  # the heading begins with a blank corner
    return tuple(tuple(row[1 : len(rows) + 1]) for row in rows)
