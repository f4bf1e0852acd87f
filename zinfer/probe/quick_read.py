"""A hurried look at a disk: files are read as a run without settings of its own would read them, short ones repeatedly,
since the first read of a few megabytes says how long a disk takes to answer and not what it gives."""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from time import perf_counter
from typing import Final

from zinfer.nvme.aligned import align_up
from zinfer.nvme.reader import DEFAULT_BLOCK_BYTES, DEFAULT_NUM_THREADS, Reader
from zinfer.offload.host_memory import HostBuffer

_REQUEST_BYTES: Final = DEFAULT_NUM_THREADS * DEFAULT_BLOCK_BYTES  # one keeps all threads of a reader busy
_NUM_REQUESTS: Final = 2  # the second bridges the end of the first
_LEAST_BYTES: Final = 64 << 20


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
        begin_s = perf_counter()
        for count, (file, offset, required) in enumerate(_repeated(files, most_bytes)):
            if len(pending) == _NUM_REQUESTS:
                num_bytes += _finish(*pending.popleft())
                if perf_counter() - begin_s > most_s:
                    break
            target = buffers[count % _NUM_REQUESTS].memory[: align_up(required)]
            pending.append((reader.read_async(file, offset, target, required), required))
        num_bytes += sum(_finish(*request) for request in pending)
        return num_bytes / (perf_counter() - begin_s)


def _repeated(files: Sequence[Path], most_bytes: int) -> Iterator[tuple[Path, int, int]]:
    """`_requests`, as often as it takes to reach the least that shows a rate."""
    num_bytes = min(most_bytes, sum(file.stat().st_size for file in files))
    for _ in range(-(-min(most_bytes, _LEAST_BYTES) // max(1, num_bytes))):
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
