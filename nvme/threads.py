"""The reference backend: a pool of ``preadv`` threads, with direct I/O if the file system allows it."""

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
from zinfer.nvme.pool import Pool

_READ_ONLY: Final = os.O_RDONLY | os.O_CLOEXEC


class ThreadsBackend(Backend):
    """Reads into host memory.

    Args:
        num_threads: concurrent requests.
    """

    reads_device_memory = False

    def __init__(self, *, num_threads: int) -> None:
        if num_threads < 1:
            raise ValueError(f"num_threads must be at least 1, not {num_threads}")
        self._pool = Pool(num_threads, "zinfer-read")

    def open(self, path: Path) -> "ThreadsFile":
        return ThreadsFile(path, self._pool)

    def close(self) -> None:
        self._pool.close()


class ThreadsFile(OpenFile):
    """A file that the threads of a pool read.

    If the file system refuses ``O_DIRECT``, at open or at the first read, the file is read through the page cache;
    this is logged once per folder and shows in ``direct``.
    """

    def __init__(self, path: Path, pool: Pool) -> None:
        self.path = path
        self._pool = pool
        self._lock = threading.Lock()
        self._direct = True
        try:
            self._fd = os.open(path, _READ_ONLY | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._fd = self._open_buffered()
            self._direct = False

    @property
    def direct(self) -> bool:
        return self._direct

    def start(self, buffer: Buffer, offset: int) -> "Future[int]":
        assert isinstance(buffer, memoryview), "preadv fills host memory only"
        return self._pool.submit(partial(self._fill, buffer, offset))

    def close(self) -> None:
        os.close(self._fd)

    def _fill(self, buffer: memoryview, offset: int) -> int:
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
            # A direct read returns an unaligned count only at the end of the file; continuing would be unaligned.
            if count == 0 or (direct and count % ALIGNMENT_BYTES):
                break
        return done

    def _fall_back(self) -> None:
        """Reopen without O_DIRECT, when the file system accepted it at open but refuses it at read."""
        with self._lock:
            if self._direct:
                plain = self._open_buffered()
                # dup2 keeps the number valid for threads that are about to read from it.
                os.dup2(plain, self._fd, inheritable=False)
                os.close(plain)
                self._direct = False

    def _open_buffered(self) -> int:
        refusal = "the file system refuses direct I/O; reading through the page cache instead"
        warn_once(f"{self.path.parent}: {refusal}; a local ext4 or xfs disk avoids that")
        return os.open(self.path, _READ_ONLY)
