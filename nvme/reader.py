"""Reads byte ranges of files into callers' buffers, in blocks that a backend reads several at a time.

Ranges must be aligned: read the covering range (``nvme.aligned``) and take the bytes from inside. A file that has
changed since it was opened is refused, because offsets learned before no longer fit it.
"""

import ctypes
import errno
import os
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from zinfer.nvme.aligned import ALIGNMENT_BYTES
from zinfer.nvme.backend import Backend, Buffer, OpenFile
from zinfer.nvme.file_identity import FileIdentity
from zinfer.nvme.threads import ThreadsBackend

DEFAULT_BLOCK_BYTES: Final = 1 << 20
DEFAULT_NUM_THREADS: Final = 32
_DESCRIPTORS: Final = Path("/proc/self/fd")


class DiskReadError(OSError):
    """A read failed or came back short; carries ``errno``, ``filename`` and ``offset`` (bytes)."""

    def __init__(self, code: int, reason: str, path: Path, offset: int) -> None:
        # A file without a name is opened by its descriptor, which says nothing of the disk that failed.
        super().__init__(code, reason, os.path.realpath(path) if path.parent == _DESCRIPTORS else str(path))
        self.offset = offset

    @classmethod
    def of(cls, error: OSError, path: Path, offset: int) -> "DiskReadError":
        """What the system or a backend reported, with the place where it happened."""
        code = error.errno or errno.EIO
        failure = cls(code, error.strerror or os.strerror(code), path, offset)
        failure.__cause__ = error
        return failure

    def __str__(self) -> str:
        name = errno.errorcode.get(self.errno or 0, "?")
        return f"{self.filename}: reading at byte {self.offset}: {self.strerror} (errno {self.errno}, {name})"


@dataclass(frozen=True)
class _Chunk:
    """A request to the backend: ``buffer`` receives the bytes from ``offset`` on; the first ``required`` must exist."""

    buffer: Buffer
    offset: int
    required: int


@dataclass(frozen=True)
class _Source:
    """A file, open until the reader closes, and its identity when its offsets were learned."""

    file: OpenFile
    identity: FileIdentity

    def change(self, offset: int) -> DiskReadError | None:
        """The error to raise if the path now stands for another file or another state of it."""
        path = self.file.path
        try:
            now = FileIdentity.of(path)
        except FileNotFoundError:
            reason = "the file has vanished since it was opened; put it back, or start again without it"
            return DiskReadError(errno.ENOENT, reason, path, offset)
        except OSError as error:
            return DiskReadError.of(error, path, offset)
        return None if now == self.identity else _changed(self.identity, now, path, offset)

    def shortfall(self, chunk: _Chunk, num_bytes: int) -> DiskReadError | None:
        """What is wrong with a block of which ``num_bytes`` were delivered."""
        if num_bytes >= chunk.required:
            return None
        size, wanted = self.identity.num_bytes, chunk.offset + chunk.required
        reason = f"the file ends after {size} bytes, {wanted - size} more were expected"
        if wanted <= size:
            reason = f"the disk delivered {num_bytes} bytes of {chunk.required} and no error"
        return DiskReadError(errno.EIO, reason, self.file.path, chunk.offset)


class Reader:
    """Fills buffers from files, several blocks at a time.

    Args:
        num_threads: blocks under way at once, of the `ThreadsBackend` that is made when no backend is given.
        block_bytes: the size of one request to the backend; longer ranges are split. A multiple of 4096.
        backend: what reads; the reader owns and closes it.
        expected: what the files were when their offsets were learned. Other files are taken as they are at their first
            read.
    """

    def __init__(
        self,
        *,
        num_threads: int = DEFAULT_NUM_THREADS,
        block_bytes: int = DEFAULT_BLOCK_BYTES,
        backend: Backend | None = None,
        expected: Mapping[Path, FileIdentity] | None = None,
    ) -> None:
        if block_bytes < ALIGNMENT_BYTES or block_bytes % ALIGNMENT_BYTES:
            raise ValueError(f"block_bytes must be a positive multiple of {ALIGNMENT_BYTES}, not {block_bytes}")
        self.block_bytes = block_bytes
        self.backend = backend or ThreadsBackend(num_threads=num_threads)
        self._expected = dict(expected or {})
        self._sources: dict[Path, _Source] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._bytes_read = 0

    @property
    def bytes_read(self) -> int:
        """Bytes of the blocks that the backend has delivered so far, alignment margins included."""
        return self._bytes_read

    @property
    def buffered_files(self) -> list[Path]:
        """Files that are read through the page cache."""
        with self._lock:
            return [path for path, source in self._sources.items() if not source.file.direct]

    def read_async(self, path: Path, offset: int, buffer: Buffer, required: int | None = None) -> "Future[None]":
        """Start filling ``buffer`` from ``offset`` (bytes) of the file and return at once.

        Args:
            buffer: writable bytes, 4096-aligned in length and, in host memory, in address; must stay alive until the
                future is done. Device memory only where the backend ``reads_device_memory``.
            required: how many leading bytes must exist; the aligned range may reach past the end of the file.

        The future raises DiskReadError when the file cannot be opened or read, ends before ``required`` bytes, has
        changed since it was opened (ESTALE) or is gone (ENOENT); any other failure is raised unchanged.
        """
        _check_aligned(path, offset, buffer)
        chunks = list(self._split(buffer, offset, buffer.nbytes if required is None else required))
        if not chunks:
            return _ended(None)
        try:
            source = self._open(path, offset)
        except DiskReadError as error:
            return _ended(error)
        request = _Request(source, offset, len(chunks))
        for chunk in chunks:
            try:
                task = source.file.start(chunk.buffer, chunk.offset)
            except RuntimeError as error:  # closed in between; what has begun may still write to the buffer
                request.tick(error)
            else:
                task.add_done_callback(partial(self._finish_chunk, request, chunk))
        return request.future

    def read(self, path: Path, offset: int, buffer: Buffer, required: int | None = None) -> None:
        """Fill ``buffer`` and return when it is full; as ``read_async``."""
        self.read_async(path, offset, buffer, required).result()

    def close(self) -> None:
        """Cancel what has not started, wait for what has, close every file; may be called again."""
        with self._lock:
            self._closed = True
        self.backend.close()
        with self._lock:
            for source in self._sources.values():
                source.file.close()
            self._sources.clear()

    def _split(self, buffer: Buffer, offset: int, required: int) -> Iterator[_Chunk]:
        for start in range(0, buffer.nbytes, self.block_bytes):
            part = buffer[start : start + self.block_bytes]
            yield _Chunk(part, offset + start, max(0, min(part.nbytes, required - start)))

    def _open(self, path: Path, offset: int) -> _Source:
        with self._lock:
            if self._closed:
                raise RuntimeError("the reader is closed")
            if path not in self._sources:
                self._sources[path] = self._open_new(path, offset)
            return self._sources[path]

    def _open_new(self, path: Path, offset: int) -> _Source:
        try:
            # Looked at before it is opened: what replaces the file in between is found after the first read.
            now = FileIdentity.of(path)
            identity = self._expected.get(path, now)
            if now == identity:
                return _Source(self.backend.open(path), identity)
        except OSError as error:
            raise DiskReadError.of(error, path, offset) from error
        raise _changed(identity, now, path, offset)

    def _finish_chunk(self, request: "_Request", chunk: _Chunk, task: "Future[int]") -> None:
        """Count what a block delivered, and tell its request how it ended."""
        if task.cancelled():
            request.tick(RuntimeError("the reader was closed before the read began"))
            return
        error = task.exception()
        if error is not None:
            request.tick(DiskReadError.of(error, request.path, chunk.offset) if isinstance(error, OSError) else error)
            return
        with self._lock:
            self._bytes_read += task.result()
        request.tick(request.source.shortfall(chunk, task.result()))


class _Request:
    """A future that is done when the last block of a range is, with the first failure if there was one."""

    def __init__(self, source: _Source, offset: int, num_chunks: int) -> None:
        self.source = source
        self.path = source.file.path
        self.future: Future[None] = Future()
        self._offset = offset
        self._left = num_chunks
        self._failure: BaseException | None = None
        self._lock = threading.Lock()

    def tick(self, failure: BaseException | None) -> None:
        """One block is over. The last one checks that the file is still the one that was opened."""
        with self._lock:
            self._failure = self._failure or failure
            self._left -= 1
            if self._left:
                return
        try:
            if self._failure is None or isinstance(self._failure, DiskReadError):
                self._failure = self.source.change(self._offset) or self._failure
        except BaseException as failure:  # or its waiter would hang
            self._failure = failure
        _end(self.future, self._failure)


def _changed(then: FileIdentity, now: FileIdentity, path: Path, offset: int) -> DiskReadError:
    difference = then.difference(now)
    reason = f"the file has changed since it was opened ({difference}); start again with the new file"
    return DiskReadError(errno.ESTALE, reason, path, offset)


def _check_aligned(path: Path, offset: int, buffer: Buffer) -> None:
    if offset % ALIGNMENT_BYTES or buffer.nbytes % ALIGNMENT_BYTES:
        raise ValueError(f"{path}: range ({offset}, {buffer.nbytes}) is not a multiple of {ALIGNMENT_BYTES}")
    if not isinstance(buffer, memoryview) or buffer.nbytes == 0:
        return
    if ctypes.addressof(ctypes.c_char.from_buffer(buffer)) % ALIGNMENT_BYTES:
        raise ValueError(f"{path}: the buffer's address is not a multiple of {ALIGNMENT_BYTES}")


def _ended(failure: BaseException | None) -> "Future[None]":
    future: Future[None] = Future()
    _end(future, failure)
    return future


def _end(future: "Future[None]", failure: BaseException | None) -> None:
    if failure is None:
        future.set_result(None)
    else:
        future.set_exception(failure)
