"""Measures how fast a disk reads and writes by block size and requests under way, and names the best setting.

Reads go through `Reader`, so that what is measured is what a run will get; writes cost a temporary file. Refuses to be
flattered by the page cache in silence: a rate says whether it was left out (``direct``).
"""

import errno
import fcntl
import itertools
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Final, Literal, TypeAlias

from zinfer.nvme.aligned import ALIGNMENT_BYTES
from zinfer.nvme.memory import map_memory
from zinfer.nvme.reader import Reader

log = logging.getLogger(__name__)

BLOCK_SIZES: Final = (1 << 20, 4 << 20, 16 << 20)
DEPTHS: Final = (1, 4, 8, 16, 32)
DEFAULT_WRITE_BYTES: Final = 4 << 30

_NUM_SPARE: Final = 4  # requests behind those under way, so that a thread that is done finds the next one waiting
_LEAST_NUM_BLOCKS: Final = 3  # with fewer, a walk round the file could meet the bytes that it has just left

Operation: TypeAlias = Literal["read", "write"]


@dataclass(frozen=True)
class DiskRate:
    """What one setting reached: ``num_threads`` requests of ``block_bytes`` under way at once.

    ``direct`` is False where the file system refused to leave the page cache out: it is in the figure then.
    """

    operation: Operation
    block_bytes: int
    num_threads: int
    bytes_per_s: float
    direct: bool


def sweep_reads(
    path: Path,
    *,
    block_sizes: Sequence[int] = BLOCK_SIZES,
    depths: Sequence[int] = DEPTHS,
    seconds_per_point: float = 0.5,
) -> list[DiskRate]:
    """Read an existing file with every block size (bytes, multiples of 4096) and number of requests under way.

    A point goes on in the file where the one before it stopped, so that no bytes are read twice in a row, and begins
    no request after ``seconds_per_point``.

    Raises:
        ValueError: the file does not hold three of the largest blocks.
        DiskReadError: it cannot be read.
    """
    walk = _Walk(path.stat().st_size)
    if walk.num_bytes < _LEAST_NUM_BLOCKS * max(block_sizes):
        least = _LEAST_NUM_BLOCKS * max(block_sizes)
        raise ValueError(f"{path}: {walk.num_bytes} bytes are too few to measure; name a file of at least {least}")
    memory = _touched_memory(max(block_sizes) * (max(depths) + _NUM_SPARE))
    points = itertools.product(block_sizes, depths)
    return [_measure_reads(path, walk, memory, *point, seconds_per_point) for point in points]


def sweep_writes(
    folder: Path,
    *,
    num_bytes: int = DEFAULT_WRITE_BYTES,
    block_sizes: Sequence[int] = BLOCK_SIZES,
    depths: Sequence[int] = DEPTHS,
    seconds_per_point: float = 0.5,
) -> list[DiskRate]:
    """Write a temporary file of ``num_bytes`` in ``folder``, round and round, with every block size and depth.

    The bytes are random. A point begins no request after ``seconds_per_point``; the time of a last flush of the
    disk's own cache counts. The file has no name while it is written, so that nothing is left behind by any end.

    Raises:
        ValueError: ``num_bytes`` does not hold three of the largest blocks.
        OSError: the folder is missing, is full or cannot be written to; ``filename`` is the folder.
    """
    if num_bytes < _LEAST_NUM_BLOCKS * max(block_sizes):
        least = _LEAST_NUM_BLOCKS * max(block_sizes)
        raise ValueError(f"num_bytes: {num_bytes} bytes are too few to measure; ask for at least {least}")
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < num_bytes:
        reason = f"a temporary file needs {num_bytes} bytes, {free_bytes} are free; make room or name another folder"
        raise OSError(errno.ENOSPC, reason, str(folder))
    walk, memory = _Walk(num_bytes), _touched_memory(max(block_sizes))
    memory[:] = os.urandom(memory.nbytes)
    with _temporary_file(folder, num_bytes) as (descriptor, direct):
        points = itertools.product(block_sizes, depths)
        rates = [_measure_writes(descriptor, walk, memory, *point, seconds_per_point) for point in points]
    return [DiskRate("write", *point, rate, direct) for point, rate in rates]


def best(rates: Sequence[DiskRate], operation: Operation) -> DiskRate:
    """The fastest of the rates of an operation; of equals the one with the fewest bytes under way."""
    found = [rate for rate in rates if rate.operation == operation]
    if not found:
        raise ValueError(f"no {operation} was measured")
    return max(found, key=lambda rate: (rate.bytes_per_s, -rate.num_threads * rate.block_bytes))


def aio_section(rate: DiskRate) -> dict[str, dict[str, int | bool]]:
    """The part of a DeepSpeed configuration that makes runs read as ``rate`` did."""
    assert rate.operation == "read", "the aio section rules reads"
    return {
        "aio": {
            "block_size": rate.block_bytes,
            "queue_depth": rate.num_threads,
            "intra_op_parallelism": 1,
            "single_submit": False,
            "overlap_events": True,
        }
    }


@dataclass
class _Walk:
    """Goes round a file, block by block of any size."""

    num_bytes: int
    position: int = 0

    def take(self, block_bytes: int) -> int:
        """The offset of the next block."""
        if self.position + block_bytes > self.num_bytes:
            self.position = 0
        self.position += block_bytes
        return self.position - block_bytes


def _measure_reads(
    path: Path, walk: _Walk, memory: memoryview, block_bytes: int, num_threads: int, seconds: float
) -> DiskRate:
    begin_s = time.perf_counter()
    with closing(Reader(num_threads=num_threads, block_bytes=block_bytes)) as reader:

        def start(slot: int) -> "Future[None]":
            buffer = memory[slot * block_bytes : (slot + 1) * block_bytes]
            return reader.read_async(path, walk.take(block_bytes), buffer)

        _keep_under_way(start, num_threads + _NUM_SPARE, seconds)
        direct = not reader.buffered_files
    # Closing has waited for what had begun and dropped the rest: all that is counted lies in the time.
    elapsed_s = time.perf_counter() - begin_s
    return DiskRate("read", block_bytes, num_threads, reader.bytes_read / elapsed_s, direct)


def _measure_writes(
    descriptor: int, walk: _Walk, memory: memoryview, block_bytes: int, num_threads: int, seconds: float
) -> tuple[tuple[int, int], float]:
    """Block size and depth, and the bytes a second that they reached."""
    written: list[int] = []
    pool = ThreadPoolExecutor(num_threads, thread_name_prefix="zinfer-tune")

    def write(offset: int) -> None:
        written.append(os.pwrite(descriptor, memory[:block_bytes], offset))

    begin_s = time.perf_counter()
    try:
        _keep_under_way(lambda slot: pool.submit(write, walk.take(block_bytes)), num_threads + _NUM_SPARE, seconds)
    finally:
        pool.shutdown(cancel_futures=True)
    os.fdatasync(descriptor)
    return (block_bytes, num_threads), sum(written) / (time.perf_counter() - begin_s)


def _keep_under_way(start: Callable[[int], "Future[None]"], num_requests: int, seconds: float) -> None:
    """Start a request for each slot, and another one whenever any is done, until the time is over."""
    done: SimpleQueue[tuple[int, Future[None]]] = SimpleQueue()

    def begin(slot: int) -> None:
        start(slot).add_done_callback(lambda request: done.put((slot, request)))

    end_s = time.perf_counter() + seconds
    for slot in range(num_requests):
        begin(slot)
    while True:
        slot, request = done.get()
        request.result()
        if time.perf_counter() >= end_s:
            return
        begin(slot)


def _touched_memory(nbytes: int) -> memoryview:
    """Page-aligned bytes whose pages the system has given: a read into new ones would pay for them."""
    memory = map_memory(nbytes)
    memory[::ALIGNMENT_BYTES] = bytes(len(range(0, nbytes, ALIGNMENT_BYTES)))
    return memoryview(memory)


@contextmanager
def _temporary_file(folder: Path, num_bytes: int) -> Iterator[tuple[int, bool]]:
    """The descriptor of a file without a name, its blocks allocated, and whether it is written past the page cache."""
    descriptor, name = tempfile.mkstemp(prefix="zinfer-tune-", dir=folder)
    try:
        os.unlink(name)
        os.posix_fallocate(descriptor, 0, num_bytes)
        yield descriptor, _set_direct(descriptor, folder)
    except OSError as error:
        error.filename = error.filename or str(folder)
        raise
    finally:
        os.close(descriptor)


def _set_direct(descriptor: int, folder: Path) -> bool:
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        log.warning("%s: the file system refuses direct I/O; the page cache is in the rates; name a local disk", folder)
        return False
    return True
