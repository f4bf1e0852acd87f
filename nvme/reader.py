"""Reads byte ranges of files into callers' buffers with a small pool of ``preadv`` threads, past the page cache.

Launch and wait are two things: ``read_async`` returns a future, ``read`` is one line over it. Refuses unaligned
ranges: the caller reads the covering range (``nvme.aligned``) and takes its bytes from inside.
"""

import ctypes
import errno
import logging
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from zinfer.nvme.aligned import ALIGNMENT_BYTES

log = logging.getLogger(__name__)

DEFAULT_BLOCK_BYTES: Final = 4 << 20
DEFAULT_NUM_THREADS: Final = 8


class DiskReadError(OSError):
    """A read failed or came back short; carries ``errno``, ``filename`` and ``offset`` (bytes)."""

    def __init__(self, code: int, reason: str, path: Path, offset: int) -> None:
        super().__init__(code, reason, str(path))
        self.offset = offset

    def __str__(self) -> str:
        name = errno.errorcode.get(self.errno or 0, "?")
        return f"{self.filename}: reading at byte {self.offset}: {self.strerror} (errno {self.errno}, {name})"


@dataclass
class _OpenFile:
    """A descriptor that lives until the reader closes; ``direct`` turns False when the file system refuses O_DIRECT."""

    path: Path
    fd: int
    direct: bool


@dataclass(frozen=True)
class _Chunk:
    """One preadv task: ``buffer`` receives the bytes from ``offset`` on, of which the first ``required`` must exist."""

    buffer: memoryview
    offset: int
    required: int


class Reader:
    """A pool of threads that fills buffers from files.

    Args:
        num_threads: reads under way at once.
        block_bytes: the size of one ``preadv``; longer ranges are split. A multiple of 4096.
        direct: open with ``O_DIRECT``. Where a file system refuses it the file is read through the page cache instead,
            which is logged once per reader and shows in ``buffered_files``.
    """

    def __init__(
        self,
        *,
        num_threads: int = DEFAULT_NUM_THREADS,
        block_bytes: int = DEFAULT_BLOCK_BYTES,
        direct: bool = True,
    ) -> None:
        if num_threads < 1:
            raise ValueError(f"num_threads must be at least 1, not {num_threads}")
        if block_bytes < ALIGNMENT_BYTES or block_bytes % ALIGNMENT_BYTES:
            raise ValueError(f"block_bytes must be a positive multiple of {ALIGNMENT_BYTES}, not {block_bytes}")
        self.block_bytes = block_bytes
        self._direct = direct
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="zinfer-read")
        self._files: dict[Path, _OpenFile] = {}
        self._lock = threading.Lock()
        self._bytes_read = 0

    @property
    def bytes_read(self) -> int:
        """Bytes that ``preadv`` has delivered so far, alignment margins included."""
        return self._bytes_read

    @property
    def buffered_files(self) -> list[Path]:
        """Files that are read through the page cache."""
        return [file.path for file in self._files.values() if not file.direct]

    def read_async(self, path: Path, offset: int, buffer: memoryview, required: int | None = None) -> "Future[None]":
        """Start filling ``buffer`` from ``offset`` (bytes) of the file and return at once.

        Args:
            buffer: writable bytes, 4096-aligned in address and length; must stay alive until the future is done.
            required: how many leading bytes must exist; the aligned range may reach past the end of the file.

        The future raises DiskReadError when the file cannot be opened or read, or ends before ``required`` bytes.
        """
        if offset % ALIGNMENT_BYTES or buffer.nbytes % ALIGNMENT_BYTES:
            raise ValueError(f"{path}: range ({offset}, {buffer.nbytes}) is not a multiple of {ALIGNMENT_BYTES}")
        if buffer.nbytes and ctypes.addressof(ctypes.c_char.from_buffer(buffer)) % ALIGNMENT_BYTES:
            raise ValueError(f"{path}: the buffer's address is not a multiple of {ALIGNMENT_BYTES}")
        needed = buffer.nbytes if required is None else required
        chunks = list(self._split(buffer, offset, needed))
        done = _Countdown(len(chunks))
        for chunk in chunks:
            self._pool.submit(self._read_chunk, path, chunk).add_done_callback(done.tick)
        return done.future

    def read(self, path: Path, offset: int, buffer: memoryview, required: int | None = None) -> None:
        """Fill ``buffer`` and return when it is full; as ``read_async``."""
        self.read_async(path, offset, buffer, required).result()

    def close(self) -> None:
        """Cancel what has not started, wait for what has, close every file."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        with self._lock:
            for file in self._files.values():
                os.close(file.fd)
            self._files.clear()

    def _split(self, buffer: memoryview, offset: int, required: int) -> Iterator[_Chunk]:
        for start in range(0, buffer.nbytes, self.block_bytes):
            part = buffer[start : start + self.block_bytes]
            yield _Chunk(part, offset + start, max(0, min(part.nbytes, required - start)))

    def _read_chunk(self, path: Path, chunk: _Chunk) -> None:
        file = self._open(path)
        try:
            done = self._fill(file, chunk)
        except OSError as error:
            code = error.errno or errno.EIO
            raise DiskReadError(code, os.strerror(code), path, chunk.offset) from error
        if done < chunk.required:
            size, wanted = os.fstat(file.fd).st_size, chunk.offset + chunk.required
            reason = f"the file ends after {size} bytes, {wanted - size} more were expected"
            raise DiskReadError(errno.EIO, reason, path, chunk.offset)

    def _fill(self, file: _OpenFile, chunk: _Chunk) -> int:
        """Read until the chunk is full or the file ends; returns the bytes read."""
        done = 0
        while done < chunk.buffer.nbytes:
            direct = file.direct
            try:
                count = os.preadv(file.fd, [chunk.buffer[done:]], chunk.offset + done)
            except OSError as error:
                if error.errno != errno.EINVAL or not direct:
                    raise
                self._fall_back(file)
                continue
            done += count
            with self._lock:
                self._bytes_read += count
            # A direct read stops at an odd count only where the file ends; going on would be an unaligned request.
            if count == 0 or (direct and count % ALIGNMENT_BYTES):
                break
        return done

    def _open(self, path: Path) -> _OpenFile:
        with self._lock:
            if path not in self._files:
                self._files[path] = self._open_new(path)
            return self._files[path]

    def _open_new(self, path: Path) -> _OpenFile:
        flags = os.O_RDONLY | os.O_CLOEXEC
        try:
            if self._direct:
                try:
                    return _OpenFile(path, os.open(path, flags | os.O_DIRECT), direct=True)
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
                    self._say_buffered(path)
            return _OpenFile(path, os.open(path, flags), direct=False)
        except OSError as error:
            code = error.errno or errno.EIO
            raise DiskReadError(code, os.strerror(code), path, 0) from error

    def _fall_back(self, file: _OpenFile) -> None:
        """Replace a descriptor whose file system accepted O_DIRECT at open and refuses it at read."""
        with self._lock:
            if not file.direct:
                return
            self._say_buffered(file.path)
            plain = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
            # dup2 keeps the number valid for threads that are about to read from it.
            os.dup2(plain, file.fd, inheritable=False)
            os.close(plain)
            file.direct = False

    def _say_buffered(self, path: Path) -> None:
        if not self.buffered_files:
            log.warning("%s: the file system refuses direct I/O; reading through the page cache instead", path)


class _Countdown:
    """A future that is done when the last of several tasks is, with the first failure if there was one."""

    def __init__(self, num_tasks: int) -> None:
        self.future: Future[None] = Future()
        self._left = num_tasks
        self._failure: BaseException | None = None
        self._lock = threading.Lock()
        if num_tasks == 0:
            self.future.set_result(None)

    def tick(self, task: "Future[None]") -> None:
        failure = RuntimeError("the reader was closed before the read began") if task.cancelled() else task.exception()
        with self._lock:
            self._failure = self._failure or failure
            self._left -= 1
            if self._left:
                return
        if self._failure is not None:
            self.future.set_exception(self._failure)
        else:
            self.future.set_result(None)
