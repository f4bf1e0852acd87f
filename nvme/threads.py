"""The reference backend: a pool of ``preadv`` threads, past the page cache where the file system allows it."""

import errno
import logging
import os
import threading
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Final

from zinfer.nvme.aligned import ALIGNMENT_BYTES
from zinfer.nvme.backend import Backend, Buffer, OpenFile
from zinfer.nvme.pool import Pool

log = logging.getLogger(__name__)

_READ_ONLY: Final = os.O_RDONLY | os.O_CLOEXEC


class ThreadsBackend(Backend):
    """Reads into host memory.

    Args:
        num_threads: requests under way at once.

    Where a file system refuses ``O_DIRECT`` the file is read through the page cache instead, which is logged once per
    backend and shows in the file's ``direct``.
    """

    reads_device_memory = False

    def __init__(self, *, num_threads: int) -> None:
        if num_threads < 1:
            raise ValueError(f"num_threads must be at least 1, not {num_threads}")
        self._pool = Pool(num_threads, "zinfer-read")
        self._has_warned = False

    def open(self, path: Path) -> "ThreadsFile":
        try:
            return ThreadsFile(self, path, os.open(path, _READ_ONLY | os.O_DIRECT), direct=True)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        self.warn_buffered(path)
        return ThreadsFile(self, path, os.open(path, _READ_ONLY), direct=False)

    def submit(self, file: "ThreadsFile", buffer: memoryview, offset: int) -> "Future[int]":
        """Have a thread of the pool fill the buffer."""
        return self._pool.submit(partial(file.fill, buffer, offset))

    def warn_buffered(self, path: Path) -> None:
        """Warn, the first time that direct I/O is refused."""
        if not self._has_warned:
            self._has_warned = True
            refusal = "the file system refuses direct I/O; reading through the page cache instead"
            log.warning("%s: %s; a local ext4 or xfs disk avoids that", path, refusal)

    def close(self) -> None:
        self._pool.close()


class ThreadsFile(OpenFile):
    """A descriptor; ``direct`` turns False when the file system refuses O_DIRECT, at open or at the first read."""

    def __init__(self, backend: ThreadsBackend, path: Path, fd: int, *, direct: bool) -> None:
        self.path = path
        self._direct = direct
        self._backend = backend
        self._fd = fd
        self._lock = threading.Lock()

    @property
    def direct(self) -> bool:
        return self._direct

    def start(self, buffer: Buffer, offset: int) -> "Future[int]":
        assert isinstance(buffer, memoryview), "preadv fills host memory only"
        return self._backend.submit(self, buffer, offset)

    def fill(self, buffer: memoryview, offset: int) -> int:
        """Read until the buffer is full or the file ends; returns the bytes read."""
        done = 0
        while done < buffer.nbytes:
            direct = self._direct
            try:
                count = os.preadv(self._fd, [buffer[done:]], offset + done)
            except OSError as error:
                if error.errno != errno.EINVAL or not direct:
                    raise
                self._fall_back()
                continue
            done += count
            # A direct read stops at an odd count only where the file ends; going on would be an unaligned request.
            if count == 0 or (direct and count % ALIGNMENT_BYTES):
                break
        return done

    def close(self) -> None:
        os.close(self._fd)

    def _fall_back(self) -> None:
        """Replace a descriptor whose file system accepted O_DIRECT at open and refuses it at read."""
        with self._lock:
            if not self._direct:
                return
            self._backend.warn_buffered(self.path)
            plain = os.open(self.path, _READ_ONLY)
            # dup2 keeps the number valid for threads that are about to read from it.
            os.dup2(plain, self._fd, inheritable=False)
            os.close(plain)
            self._direct = False
