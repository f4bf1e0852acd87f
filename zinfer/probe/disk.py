"""From a path to the disk's rates: sweeps a file that is there, or writes a temporary one.

The temporary file has no name (O_TMPFILE, or unlinked at once), so that it is gone however the process ends.
"""

import os
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from zinfer.errors import ConfigError
from zinfer.nvme.aligned import align_up
from zinfer.nvme.reader import DEFAULT_BLOCK_BYTES, DEFAULT_NUM_THREADS, Reader
from zinfer.nvme.tune import DiskRate, Operation, best, sweep_reads, sweep_writes
from zinfer.offload.host_memory import HostBuffer
from zinfer.probe.sizes import Sizes

_LEAST_NUM_BLOCKS: Final = 4  # a sweep must not come round to the same bytes at once
_LEAST_FILE_BYTES: Final = 64 << 20  # less says nothing of a disk
_FREE_SHARE: Final = 4  # the file takes at most a quarter of the free space
_CHUNK_BYTES: Final = 16 << 20
_MOST_WRITING_S: Final = 10.0  # a slow disk is measured with a smaller file
_REQUEST_BYTES: Final = DEFAULT_NUM_THREADS * DEFAULT_BLOCK_BYTES  # one keeps all threads of a reader busy
_NUM_REQUESTS: Final = 2  # the second bridges the end of the first
_LEAST_READ_BYTES: Final = 64 << 20


@dataclass(frozen=True)
class DiskFindings:
    """What was swept on one disk. ``number``: the device number of the file system (`st_dev`)."""

    path: str
    number: int
    rates: tuple[DiskRate, ...]

    def best(self, operation: Operation) -> DiskRate | None:
        """The fastest point, None where the operation was not swept."""
        swept = [rate for rate in self.rates if rate.operation == operation]
        return best(swept, operation) if swept else None


def disk_number(path: Path) -> int:
    """The device number of the disk that holds ``path``.

    Raises:
        ConfigError: there is no such file or folder.
    """
    try:
        return path.stat().st_dev
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give a file or folder on the disk to be measured") from error


def measure_disk(path: Path, sizes: Sizes) -> DiskFindings:
    """Sweep direct reads of a file, of a checkpoint folder's largest file, or of a temporary file in another folder (or
    one whose files are too small); in the last case direct writes too.

    Raises:
        ConfigError: nothing there, nothing in it, no right to read or write it, or too little room.
        OSError: the disk failed; the message names the file.
    """
    number = disk_number(path)
    file = path if path.is_file() else _largest_weights(path, _LEAST_NUM_BLOCKS * min(sizes.block_sizes))
    if file is not None:
        return DiskFindings(str(path.absolute()), number, tuple(_sweep_reads(checked_file(file), sizes)))
    num_bytes = _room_for_file(path, sizes)
    with _temporary_file(path, num_bytes) as written:
        rates = _sweep_reads(written, sizes)
    rates += sweep_writes(
        path,
        block_sizes=_fitting(sizes, num_bytes),
        depths=sizes.write_depths,
        seconds_per_point=sizes.seconds_per_point,
        num_bytes=num_bytes,
    )
    return DiskFindings(str(path.absolute()), number, tuple(rates))


def checked_file(path: Path) -> Path:
    """The same path, once it is known to be a file that can be read and holds something.

    Raises:
        ConfigError: it is not.
    """
    try:
        with path.open("rb") as file:
            if file.read(1):
                return path
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}; give a file that can be read, or a folder that can be written to"
        ) from error
    raise ConfigError(f"{path}: an empty file; give one that is as large as a checkpoint's, or a folder")


def _sweep_reads(file: Path, sizes: Sizes) -> list[DiskRate]:
    num_bytes = file.stat().st_size
    fitting = _fitting(sizes, num_bytes)
    if not fitting:
        least = _LEAST_NUM_BLOCKS * min(sizes.block_sizes)
        raise ConfigError(
            f"{file}: {num_bytes} bytes say nothing of a disk; give a file of {least} or more, or a folder"
        )
    return sweep_reads(file, block_sizes=fitting, depths=sizes.read_depths, seconds_per_point=sizes.seconds_per_point)


def _fitting(sizes: Sizes, num_bytes: int) -> list[int]:
    """The block sizes that a file of ``num_bytes`` can be swept with."""
    return [block_bytes for block_bytes in sizes.block_sizes if _LEAST_NUM_BLOCKS * block_bytes <= num_bytes]


def _largest_weights(folder: Path, least_bytes: int) -> Path | None:
    """The largest safetensors file of a checkpoint folder, None where there is none of ``least_bytes``."""
    sizes = {path: path.stat().st_size for path in folder.glob("*.safetensors") if path.is_file()}
    largest = max(sizes, key=sizes.__getitem__, default=None)
    return largest if largest is not None and sizes[largest] >= least_bytes else None


def _room_for_file(folder: Path, sizes: Sizes) -> int:
    free = shutil.disk_usage(folder).free
    least = min(sizes.file_bytes, _LEAST_FILE_BYTES)
    if free // _FREE_SHARE < least:
        raise ConfigError(
            f"{folder}: {free} bytes are free, too little to measure the disk with: a temporary file of {least} bytes "
            f"should leave most of them free. Make room for {least * _FREE_SHARE} bytes, or give a large file on this "
            "disk to be read"
        )
    return min(sizes.file_bytes, free // _FREE_SHARE)


@contextmanager
def _temporary_file(folder: Path, num_bytes: int) -> Iterator[Path]:
    """A path to a nameless file of random bytes, at most ``num_bytes``, all of them on the disk."""
    with _open_nameless(folder) as file:
        chunk = memoryview(os.urandom(min(_CHUNK_BYTES, num_bytes)))  # zeros would be compressed away on some disks
        begin_s = time.perf_counter()
        for offset in range(0, num_bytes, _CHUNK_BYTES):
            _write(file.fileno(), chunk[: num_bytes - offset], folder)
            if time.perf_counter() - begin_s > _MOST_WRITING_S:
                break
        yield Path(f"/proc/self/fd/{file.fileno()}")


def _open_nameless(folder: Path) -> IO[bytes]:
    try:
        return tempfile.TemporaryFile(dir=folder, buffering=0)
    except OSError as error:
        raise ConfigError(
            f"{folder}: {error.strerror}; give a folder that can be written to, or a file to be read"
        ) from error


def _write(descriptor: int, part: memoryview, folder: Path) -> None:
    """Append the bytes and have them on the disk: what is in the page cache still would be written during reads."""
    try:
        while part:
            part = part[os.write(descriptor, part) :]
        os.fdatasync(descriptor)
    except OSError as error:
        raise OSError(error.errno, error.strerror, f"a temporary file in {folder}") from error


def quick_read(files: Sequence[Path], *, most_bytes: int, most_s: float) -> float:
    """Bytes read a second, from the files' beginnings, until ``most_bytes`` are read or ``most_s`` are over.

    Files of less than 64 MiB altogether are read again until that, or the time, is reached.

    Raises:
        DiskReadError: a file cannot be read.
    """
    buffers = [HostBuffer(_REQUEST_BYTES) for _ in range(_NUM_REQUESTS)]
    for buffer in buffers:
        buffer.touch()
    pending: deque[tuple[Future[None], int]] = deque()
    num_bytes = 0
    with closing(Reader()) as reader:  # closed, and with it every read that is under way, before the buffers go
        begin_s = time.perf_counter()
        for count, (file, offset, required) in enumerate(_repeated(files, most_bytes)):
            if len(pending) == _NUM_REQUESTS:
                num_bytes += _finish(*pending.popleft())
                if time.perf_counter() - begin_s > most_s:
                    break
            target = buffers[count % _NUM_REQUESTS].memory[: align_up(required)]
            pending.append((reader.read_async(file, offset, target, required), required))
        num_bytes += sum(_finish(*request) for request in pending)
        return num_bytes / (time.perf_counter() - begin_s)


def _repeated(files: Sequence[Path], most_bytes: int) -> Iterator[tuple[Path, int, int]]:
    """`_requests`, as often as it takes to reach the least that shows a rate."""
    num_bytes = min(most_bytes, sum(file.stat().st_size for file in files))
    for _ in range(-(-min(most_bytes, _LEAST_READ_BYTES) // max(1, num_bytes))):
        yield from _requests(files, most_bytes)


def _requests(files: Sequence[Path], most_bytes: int) -> Iterator[tuple[Path, int, int]]:
    """Files, offsets and lengths in bytes, ``most_bytes`` altogether."""
    left = most_bytes
    for file in files:
        for offset in range(0, min(left, file.stat().st_size), _REQUEST_BYTES):
            required = min(left, file.stat().st_size - offset, _REQUEST_BYTES)
            left -= required
            yield file, offset, required


def _finish(request: "Future[None]", num_bytes: int) -> int:
    request.result()
    return num_bytes
