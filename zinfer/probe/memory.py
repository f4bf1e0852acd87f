"""Host memory: copies, the first touch of pages, and their registration with CUDA."""

import ctypes
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass

import torch

from zinfer.offload.host_memory import HostBuffer
from zinfer.probe.clock import PerSecond, median_seconds


@dataclass(frozen=True)
class MemoryRates:
    """Bytes a second: copied with one thread and with torch's ``num_threads``; given by the system at their first touch
    by one thread and by the threads of `HostBuffer.touch`; registered with CUDA once touched (None: not measured,
    because there is no CUDA device or the registration was refused)."""

    num_threads: int
    copy_one_bytes_per_s: PerSecond
    copy_all_bytes_per_s: PerSecond
    touch_one_bytes_per_s: PerSecond
    touch_several_bytes_per_s: PerSecond
    register_bytes_per_s: PerSecond | None


def measure_memory(nbytes: int, *, pin: bool, repeats: int) -> MemoryRates:
    """All of them, over buffers of ``nbytes``; ``pin`` asks for registration with CUDA, which is undone."""
    with _torch_threads(1):
        copy_one = measure_copy(nbytes, repeats=repeats)
    return MemoryRates(
        num_threads=torch.get_num_threads(),
        copy_one_bytes_per_s=copy_one,
        copy_all_bytes_per_s=measure_copy(nbytes, repeats=repeats),
        touch_one_bytes_per_s=nbytes / _median_of_fresh(nbytes, _touch_alone, repeats),
        touch_several_bytes_per_s=nbytes / _median_of_fresh(nbytes, HostBuffer.touch, repeats),
        register_bytes_per_s=_measure_registration(nbytes, repeats) if pin else None,
    )


def measure_copy(nbytes: int, *, repeats: int) -> float:
    """Bytes copied a second between two places in host memory, with torch's present number of threads."""
    source = torch.ones(nbytes, dtype=torch.uint8)
    target = torch.empty_like(source)
    return nbytes / median_seconds(lambda: target.copy_(source), repeats=repeats)


@contextmanager
def _torch_threads(num_threads: int) -> Iterator[None]:
    former = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(former)


def _touch_alone(buffer: HostBuffer) -> None:
    ctypes.memset(buffer.tensor.data_ptr(), 0, buffer.nbytes)


def _median_of_fresh(nbytes: int, work: Callable[[HostBuffer], None], repeats: int) -> float:
    """Seconds of ``work`` on a buffer whose pages the system has not given yet: a new one each time."""
    seconds = []
    for _ in range(repeats):
        buffer = HostBuffer(nbytes)
        begin_s = time.perf_counter()
        work(buffer)
        seconds.append(time.perf_counter() - begin_s)
    return statistics.median(seconds)


def _measure_registration(nbytes: int, repeats: int) -> float | None:
    seconds = []
    for _ in range(repeats):
        with closing(HostBuffer(nbytes)) as buffer:
            buffer.touch()
            begin_s = time.perf_counter()
            buffer.pin()
            seconds.append(time.perf_counter() - begin_s)
            if not buffer.pinned:  # `pin` has logged why, and the remedy
                return None
    return nbytes / statistics.median(seconds)
