"""The reference backend: a pool of ``preadv`` threads, with direct I/O if the file system allows it.

Direct reads of large blocks are the fastest from a disk, and leave the page cache to others. But they go to the disk
even for bytes that are in memory already, so those are copied from the page cache instead.
"""

import errno
import os
import threading
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Final

from zinfer.nvme.aligned import ALIGNMENT_BYTES
from zinfer.nvme.backend import Backend, Buffer, OpenFile
from zinfer.nvme.memory import warn_once
from zinfer.nvme.page_cache import CachedPages
from zinfer.nvme.pool import Pool

_READ_ONLY: Final = os.O_RDONLY | os.O_CLOEXEC


class ThreadsBackend(Backend):
    """Reads into host memory.

    Args:
        num_threads: concurrent requests.
        uses_cache: copy what is in the page cache from there; if not, all of it is read from the disk.
    """

    reads_device_memory = False

    def __init__(self, *, num_threads: int, uses_cache: bool = True) -> None:
        if num_threads < 1:
            raise ValueError(f"num_threads must be at least 1, not {num_threads}")
        self._pool = Pool(num_threads, "zinfer-read")
        self._uses_cache = uses_cache

    def open(self, path: Path) -> "ThreadsFile":
        return ThreadsFile(path, self._pool, self._uses_cache)

    def close(self) -> None:
        self._pool.close()


class ThreadsFile(OpenFile):
    """A file that the threads of a pool read: from the page cache what is there, the rest from the disk.

    If the file system refuses ``O_DIRECT``, at open or at the first read, the file is read through the page cache;
    this is logged once per folder and shows in ``direct``.
    """

    def __init__(self, path: Path, pool: Pool, uses_cache: bool) -> None:
        self.path = path
        self._pool = pool
        self._lock = threading.Lock()
        self._fd = os.open(path, _READ_ONLY)
        self._direct_fd: int | None = None
        self._direct = True
        self._cached = CachedPages(self._fd) if uses_cache else None
        try:
            # The same file, whatever the path names by now.
            self._direct_fd = os.open(f"/proc/self/fd/{self._fd}", _READ_ONLY | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                self.close()
                raise
            self._fall_back()

    @property
    def direct(self) -> bool:
        return self._direct

    def in_memory(self, offset: int, num_bytes: int) -> bool:
        return self._cached is not None and self._cached.hold(offset, num_bytes)

    def start(self, buffer: Buffer, offset: int) -> "Future[int]":
        assert isinstance(buffer, memoryview), "preadv fills host memory only"
        return self._pool.submit(partial(self._fill, buffer, offset))

    def close(self) -> None:
        if self._cached is not None:
            self._cached.close()
        for fd in (self._fd, self._direct_fd):
            if fd is not None:
                os.close(fd)

    def _fill(self, buffer: memoryview, offset: int) -> int:
        """Read until the buffer is full or the file ends; returns the bytes read."""
        is_cached = self.in_memory(offset, buffer.nbytes)
        done = 0
        while done < buffer.nbytes:
            fd = self._direct_fd if self._direct and not is_cached else None
            try:
                count = os.preadv(self._fd if fd is None else fd, [buffer[done:]], offset + done)
            except OSError as error:
                if error.errno != errno.EINVAL or fd is None:
                    raise
                self._fall_back()  # accepted at open, refused at read
                continue
            done += count
            # A direct read returns an unaligned count only at the end of the file; continuing would be unaligned.
            if count == 0 or (fd is not None and count % ALIGNMENT_BYTES):
                break
        return done

    def _fall_back(self) -> None:
        """Read through the page cache from now on; several threads may find that out at once."""
        with self._lock:
            if self._direct:
                refusal = "the file system refuses direct I/O; reading through the page cache instead"
                warn_once(f"{self.path.parent}: {refusal}; a local ext4 or xfs disk avoids that")
                self._direct = False
