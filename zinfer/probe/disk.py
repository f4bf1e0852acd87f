"""Measure a disk's rates by block size and requests in flight, on an existing file or a temporary one.

Reads go through `Reader`, so a run will reach the same rates. The temporary file has no name (O_TMPFILE, or unlinked at
once), so it disappears however the process ends.
"""

import errno
import itertools
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

from zinfer.errors import ConfigError
from zinfer.nvme.pool import when_done
from zinfer.nvme.reader import DEFAULT_BLOCK_BYTES, DEFAULT_NUM_THREADS, Reader
from zinfer.offload.host_memory import HostBuffer
from zinfer.probe.sizes import Sizes

_LEAST_NUM_BLOCKS: Final = 4  # with fewer, reading in a circle could return to bytes just read
_NUM_SPARE: Final = 4  # queued requests beyond those in flight, so that no thread waits for the next one
_LEAST_FILE_BYTES: Final = 64 << 20  # less is meaningless
_FREE_SHARE: Final = 4  # the file takes at most a quarter of the free space
_CHUNK_BYTES: Final = 16 << 20
_MOST_WRITING_S: Final = 10.0  # a slow disk is measured with a smaller file

Operation: TypeAlias = Literal["read", "write"]


@dataclass(frozen=True)
class DiskRate:
    """The rate of one setting: ``num_threads`` requests of ``block_bytes`` in flight.

    ``direct`` is False if the file system refused direct I/O: the rate then includes the page cache.
    """

    operation: Operation
    block_bytes: int
    num_threads: int
    bytes_per_s: float
    direct: bool


@dataclass(frozen=True)
class DiskFindings:
    """The rates measured on one disk. ``number``: the device number of the file system (`st_dev`)."""

    path: str
    number: int
    rates: tuple[DiskRate, ...]

    def best(self, operation: Operation) -> DiskRate | None:
        """Return the fastest setting; of equal ones that with the fewest bytes in flight. None if none was measured."""
        swept = [rate for rate in self.rates if rate.operation == operation]
        return max(swept, key=lambda rate: (rate.bytes_per_s, -rate.num_threads * rate.block_bytes), default=None)


def aio_section(rate: DiskRate) -> dict[str, dict[str, int | bool]]:
    """Return the DeepSpeed configuration section for reading with the settings of ``rate``."""
    return {
        "aio": {
            "block_size": rate.block_bytes,
            "queue_depth": rate.num_threads,
            "intra_op_parallelism": 1,
            "single_submit": False,
            "overlap_events": True,
        }
    }


def disk_number(path: Path) -> int:
    """Return the device number of the disk with ``path``.

    Raises:
        ConfigError: there is no such file or folder.
    """
    try:
        return path.stat().st_dev
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give a file or folder on the disk to be measured") from error


def measure_disk(path: Path, sizes: Sizes) -> DiskFindings:
    """Measure direct reads of a file, or of a checkpoint folder's largest file. In other folders, or if the files are
    too small, measure direct reads and writes of a temporary file.

    Raises:
        ConfigError: the path is missing, empty or without permission, or the disk has too little space.
        OSError: the disk failed; the message names the file.
    """
    number = disk_number(path)
    file = path if path.is_file() else _largest_weights(path, _LEAST_NUM_BLOCKS * min(sizes.block_sizes))
    if file is not None:
        rates = sweep_reads(checked_file(file), sizes)
    else:
        with _temporary_file(path, _room_for_file(path, sizes)) as written:
            rates = sweep_reads(written, sizes) + sweep_writes(written, sizes)
    return DiskFindings(str(path.absolute()), number, tuple(rates))


def checked_file(path: Path) -> Path:
    """Return the path if it is a readable file that is not empty.

    Raises:
        ConfigError: it is not.
    """
    try:
        with path.open("rb") as file:
            if file.read(1):
                return path
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give a readable file, or a writable folder") from error
    raise ConfigError(f"{path}: an empty file; give one that is as large as a checkpoint's, or a folder")


def sweep_reads(file: Path, sizes: Sizes) -> list[DiskRate]:
    """Measure reads with every depth, and every block size that fits four times into the file.

    Each setting continues in the file where the last one stopped, so that no bytes are read twice in a row, and starts
    no request after ``seconds_per_point``.

    Raises:
        ConfigError: the file is too small.
        DiskReadError: it cannot be read.
    """
    walk = _Walk(file.stat().st_size)
    points = _points(file, walk.num_bytes, sizes, sizes.read_depths)
    memory = _touched_memory(max(block_bytes * (depth + _NUM_SPARE) for block_bytes, depth in points))
    return [_measure_reads(file, walk, memory, *point, sizes.seconds_per_point) for point in points]


def sweep_writes(file: Path, sizes: Sizes) -> list[DiskRate]:
    """Measure writes with every block size and depth, like `sweep_reads`. Overwrites the file with random bytes.

    The time includes a final flush of the disk's cache.
    """
    walk = _Walk(file.stat().st_size)
    points = _points(file, walk.num_bytes, sizes, sizes.write_depths)
    memory = _touched_memory(max(sizes.block_sizes))
    memory[:] = os.urandom(memory.nbytes)
    descriptor, direct = _open_to_write(file)
    try:
        rates = [(point, _write_rate(descriptor, walk, memory, *point, sizes.seconds_per_point)) for point in points]
    finally:
        os.close(descriptor)
    return [DiskRate("write", *point, rate, direct) for point, rate in rates]


def quick_read(files: Sequence[Path], seconds: float) -> float:
    """Return the bytes per second of reading the largest file like a run does, measured for ``seconds``."""
    file = max(files, key=lambda each: each.stat().st_size)
    memory = _touched_memory(DEFAULT_BLOCK_BYTES * (DEFAULT_NUM_THREADS + _NUM_SPARE))
    walk = _Walk(file.stat().st_size)
    return _measure_reads(file, walk, memory, DEFAULT_BLOCK_BYTES, DEFAULT_NUM_THREADS, seconds).bytes_per_s


def _points(file: Path, num_bytes: int, sizes: Sizes, depths: Sequence[int]) -> list[tuple[int, int]]:
    """Return the settings for a file: block sizes that fit, each with every depth."""
    least = _LEAST_NUM_BLOCKS * min(sizes.block_sizes)
    if num_bytes < least:
        raise ConfigError(
            f"{file}: {num_bytes} bytes say nothing of a disk; give a file of {least} or more, or a folder"
        )
    fitting = [block_bytes for block_bytes in sizes.block_sizes if _LEAST_NUM_BLOCKS * block_bytes <= num_bytes]
    return list(itertools.product(fitting, depths))


@dataclass
class _Walk:
    """Iterates over a file in a circle, in blocks of any size."""

    num_bytes: int
    position: int = 0

    def take(self, block_bytes: int) -> int:
        """Return the offset of the next block."""
        if self.position + block_bytes > self.num_bytes:
            self.position = 0
        self.position += block_bytes
        return self.position - block_bytes


def _measure_reads(
    file: Path, walk: _Walk, memory: memoryview, block_bytes: int, num_threads: int, seconds: float
) -> DiskRate:
    begin_s = time.perf_counter()
    with closing(Reader(num_threads=num_threads, block_bytes=block_bytes, uses_cache=False)) as reader:

        def start(slot: int) -> "Future[None]":
            buffer = memory[slot * block_bytes : (slot + 1) * block_bytes]
            return reader.read_async(file, walk.take(block_bytes), buffer, min(block_bytes, walk.num_bytes))

        _keep_under_way(start, num_threads + _NUM_SPARE, seconds)
        direct = not reader.buffered_files
    # Closing waits for running requests and drops the others, so the elapsed time covers all counted bytes.
    elapsed_s = time.perf_counter() - begin_s
    return DiskRate("read", block_bytes, num_threads, reader.bytes_read / elapsed_s, direct)


def _write_rate(
    descriptor: int, walk: _Walk, memory: memoryview, block_bytes: int, num_threads: int, seconds: float
) -> float:
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
    return sum(written) / (time.perf_counter() - begin_s)


def _keep_under_way(start: Callable[[int], "Future[None]"], num_requests: int, seconds: float) -> None:
    """Start a request for each slot, and another one whenever one finishes, until the time is over."""
    done: SimpleQueue[tuple[int, Future[None]] | BaseException] = SimpleQueue()

    def begin(slot: int) -> None:
        when_done(start(slot), lambda request: done.put((slot, request)), done.put)

    end_s = time.perf_counter() + seconds
    for slot in range(num_requests):
        begin(slot)
    while True:
        if isinstance(found := done.get(), BaseException):
            raise found
        slot, request = found
        request.result()
        if time.perf_counter() >= end_s:
            return
        begin(slot)


def _touched_memory(nbytes: int) -> memoryview:
    """Return page-aligned memory with all pages faulted in, so that reads do not include page faults."""
    buffer = HostBuffer(nbytes)
    buffer.touch()
    return buffer.memory


def _open_to_write(file: Path) -> tuple[int, bool]:
    """Open a file; return the descriptor, and whether it bypasses the page cache."""
    try:
        return os.open(file, os.O_WRONLY | os.O_DIRECT), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return os.open(file, os.O_WRONLY), False


def _largest_weights(folder: Path, least_bytes: int) -> Path | None:
    """Return the largest file of a folder with weights, or None if none has ``least_bytes``."""
    files = (path for pattern in ("*.safetensors", "pytorch_model*.bin") for path in folder.glob(pattern))
    sizes = {path: path.stat().st_size for path in files if path.is_file()}
    return max((path for path in sizes if sizes[path] >= least_bytes), key=sizes.__getitem__, default=None)


def _room_for_file(folder: Path, sizes: Sizes) -> int:
    free = shutil.disk_usage(folder).free
    least = min(sizes.file_bytes, _LEAST_FILE_BYTES)
    if free // _FREE_SHARE < least:
        raise ConfigError(
            f"{folder}: {free} bytes are free, too little to measure the disk with a temporary file; make room for "
            f"{least * _FREE_SHARE} bytes, or give a large file on this disk to read"
        )
    return min(sizes.file_bytes, free // _FREE_SHARE)


@contextmanager
def _temporary_file(folder: Path, num_bytes: int) -> Iterator[Path]:
    """Yield the path of an unnamed file of random bytes, at most ``num_bytes``, synced to disk."""
    try:
        file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
    except OSError as error:
        problem = f"{folder}: {error.strerror}; give a writable folder, or a file to read"
        raise ConfigError(problem) from error
    with file:
        chunk = memoryview(os.urandom(min(_CHUNK_BYTES, num_bytes)))  # some disks would compress zeros
        begin_s = time.perf_counter()
        try:
            for offset in range(0, num_bytes, _CHUNK_BYTES):
                part = chunk[: num_bytes - offset]
                while part:
                    part = part[file.write(part) :]
                os.fdatasync(file.fileno())  # else write-back would run during the reads
                if time.perf_counter() - begin_s > _MOST_WRITING_S:
                    break
            yield Path(f"/proc/self/fd/{file.fileno()}")
        except OSError as error:
            error.filename = error.filename or f"a temporary file in {folder}"
            raise
