"""The page cache: what of a file the system holds in memory, after a download, say, and reading files into it.

[Note: reading ahead] A command imports modules for seconds before it knows where each byte of the weights belongs. What
a disk reads into the page cache in these seconds is copied from there by `ThreadsFile`, several times as fast. So
`read_ahead` begins before the imports, and ends when the first `Reader` is made: two readers of one disk would read the
same bytes twice.
"""

import ctypes
import logging
import mmap
import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from zinfer.nvme.pool import start_thread

_LOG: Final = logging.getLogger(__name__)

_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_LIBC.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
_FAILED: Final = ctypes.c_void_p(-1).value
_PAGE_BYTES: Final = mmap.PAGESIZE
_NUM_AHEAD: Final = 4
"""Threads that read ahead, each a stretch of a file from front to back, as the system's own reading ahead expects."""
_STRETCH_BYTES: Final = 256 << 20
_STEP_BYTES: Final = 16 << 20


class CachedPages:
    """Tells which bytes of a file are in the page cache, by mincore(2), which reads nothing.

    To those who neither own the file nor may write it the system does not say; for them, and where the file cannot be
    mapped, nothing is cached.

    Args:
        fd: the file, open for reading; it may be closed afterwards.
    """

    def __init__(self, fd: int) -> None:
        self._num_bytes = os.fstat(fd).st_size
        self._address: int | None = None
        if self._num_bytes and _is_told(fd):
            mapped = _LIBC.mmap(None, self._num_bytes, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
            self._address = None if mapped == _FAILED else mapped

    def hold(self, offset: int, num_bytes: int) -> bool:
        """Return whether all of these bytes, as far as the file has them, are cached at this moment."""
        begin = offset - offset % _PAGE_BYTES
        end = min(offset + num_bytes, self._num_bytes)
        if self._address is None or end <= begin:
            return False
        pages = ctypes.create_string_buffer(-(-(end - begin) // _PAGE_BYTES))
        return _LIBC.mincore(self._address + begin, end - begin, pages) == 0 and b"\0" not in pages.raw

    def close(self) -> None:
        """Unmap the file; nothing is cached from then on."""
        if self._address is not None:
            _LIBC.munmap(self._address, self._num_bytes)
            self._address = None


def _is_told(fd: int) -> bool:
    """Return whether mincore(2) tells this process about the file; if not, it says that all is in memory."""
    return os.fstat(fd).st_uid == os.geteuid() or os.access(f"/proc/self/fd/{fd}", os.W_OK)


class _Ahead:
    """Files that threads read into the page cache until this is stopped, or so many bytes are there."""

    def __init__(self, files: Iterable[Path], max_bytes: int) -> None:
        self._is_stopped = False
        self._stretches = _stretches(files, max_bytes)
        self._lock = threading.Lock()
        self._failures: list[BaseException] = []
        self._threads = [
            start_thread(f"zinfer-ahead-{number}", self._read, self._failures.append) for number in range(_NUM_AHEAD)
        ]

    def end(self) -> None:
        self._is_stopped = True
        for thread in self._threads:
            thread.join()
        if self._failures:
            raise self._failures[0]

    def _read(self) -> None:
        """Read stretches. A file that cannot be read is left to those who need it, whose errors say what to do."""
        try:
            with open("/dev/null", "wb") as nowhere:
                while not self._is_stopped and (stretch := self._next_stretch()) is not None:
                    self._read_stretch(nowhere.fileno(), *stretch)
        except OSError as error:
            _LOG.debug("not read ahead: %s", error)

    def _next_stretch(self) -> tuple[Path, int, int] | None:
        with self._lock:
            return next(self._stretches, None)

    def _read_stretch(self, nowhere: int, path: Path, offset: int, num_bytes: int) -> None:
        with open(path, "rb", buffering=0) as file:
            if not _is_told(file.fileno()):
                return
            done = 0
            # What is sent to /dev/null is read, and not copied.
            while done < num_bytes and not self._is_stopped:
                step = os.sendfile(nowhere, file.fileno(), offset + done, min(_STEP_BYTES, num_bytes - done))
                if step == 0:
                    return
                done += step


def _stretches(files: Iterable[Path], max_bytes: int) -> Iterator[tuple[Path, int, int]]:
    """Yield path, offset and length in bytes of each stretch of the files, in order, ``max_bytes`` together at most."""
    for path in files:
        num_bytes = path.stat().st_size
        for offset in range(0, num_bytes, _STRETCH_BYTES):
            length = min(_STRETCH_BYTES, num_bytes - offset, max_bytes)
            if length <= 0:
                return
            yield path, offset, length
            max_bytes -= length


_ahead: list[_Ahead] = []


def read_ahead(files: Iterable[Path], max_bytes: int) -> None:
    """Begin to read files into the page cache, in their order, and return at once ([Note: reading ahead]).

    Args:
        max_bytes: how much to read at most, in bytes. It takes memory that the system gives to whoever asks.
    """
    _ahead.append(_Ahead(files, max_bytes))


def end_reading_ahead() -> None:
    """End what `read_ahead` began, and wait for the steps that are under way; none is no error."""
    while _ahead:
        _ahead.pop().end()
