"""Reads byte ranges of files into callers' buffers, in blocks that a backend reads concurrently.

Ranges must be aligned: read the covering range (``nvme.aligned``) and use the bytes inside. A file that has changed
since it was opened is refused, because known offsets may be wrong.
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
from typing import Final, Protocol

from zinfer.nvme.aligned import ALIGNMENT_BYTES
from zinfer.nvme.backend import Backend, Buffer, OpenFile
from zinfer.nvme.file_identity import FileIdentity
from zinfer.nvme.page_cache import end_reading_ahead
from zinfer.nvme.pool import when_done
from zinfer.nvme.threads import ThreadsBackend

DEFAULT_BLOCK_BYTES: Final = 1 << 20
DEFAULT_NUM_THREADS: Final = 32
_COPY_BYTES: Final = 4 << 20
"""The size of a request for bytes that are in memory, unless smaller ones than the default were asked for: 32 threads
that copy 1 MiB at a time wait for the interpreter's lock (9 GB/s on 16 cores; 16 threads and 4 MiB: 26)."""
_DESCRIPTORS: Final = Path("/proc/self/fd")


class DiskReadError(OSError):
    """A read failed or came back short; carries ``errno``, ``filename`` and ``offset`` (bytes)."""

    def __init__(self, code: int, reason: str, path: Path, offset: int) -> None:
        # An unnamed file is opened through /proc; its real path tells which disk failed.
        super().__init__(code, reason, os.path.realpath(path) if path.parent == _DESCRIPTORS else str(path))
        self.offset = offset

    @classmethod
    def of(cls, error: OSError, path: Path, offset: int) -> "DiskReadError":
        """Make the error for a system's or backend's error, with its file and offset."""
        code = error.errno or errno.EIO
        failure = cls(code, error.strerror or os.strerror(code), path, offset)
        failure.__cause__ = error
        return failure

    def __str__(self) -> str:
        name = errno.errorcode.get(self.errno or 0, "?")
        return f"{self.filename}: reading at byte {self.offset}: {self.strerror} (errno {self.errno}, {name})"


@dataclass(frozen=True)
class _Chunk:
    """A request to the backend: fill ``buffer`` from ``offset``; the first ``required`` bytes must exist."""

    buffer: Buffer
    offset: int
    required: int


@dataclass(frozen=True)
class _Source:
    """A file, open until the reader closes, and its identity when its offsets were read."""

    file: OpenFile
    identity: FileIdentity

    def change(self, offset: int) -> DiskReadError | None:
        """Return an error if the path now names another file or a changed one."""
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
        """Return an error if ``num_bytes`` are too few for a block."""
        if num_bytes >= chunk.required:
            return None
        size, wanted = self.identity.num_bytes, chunk.offset + chunk.required
        reason = f"the file ends after {size} bytes, {wanted - size} more were expected"
        if wanted <= size:
            reason = f"the disk delivered {num_bytes} bytes of {chunk.required} and no error"
        return DiskReadError(errno.EIO, reason, self.file.path, chunk.offset)


class ReadObserver(Protocol):
    """Looks at what a reader has read, before the reader says that it is there."""

    def note(self, path: Path, offset: int, buffer: Buffer, num_bytes: int) -> DiskReadError | None:
        """Look at the bytes of a block, in the thread that read them; return an error to fail the read.

        Args:
            offset: of the block in the file, a multiple of 4096.
            num_bytes: how many of the buffer were read, less than all only at the end of the file.
        """


class Reader:
    """Fills buffers from files, several blocks at a time. What was read ahead until now is read no further.

    Args:
        num_threads: concurrent blocks of the default `ThreadsBackend`.
        block_bytes: the size of one request to the backend; longer ranges are split. A multiple of 4096.
        backend: the backend, which the reader owns and closes; by default a `ThreadsBackend`.
        uses_cache: of the default backend; False to measure the disk.
        expected: identities of files when their offsets were read. Other files are identified at their first read.
        observer: looks at all blocks.
    """

    def __init__(
        self,
        *,
        num_threads: int = DEFAULT_NUM_THREADS,
        block_bytes: int = DEFAULT_BLOCK_BYTES,
        backend: Backend | None = None,
        expected: Mapping[Path, FileIdentity] | None = None,
        uses_cache: bool = True,
        observer: ReadObserver | None = None,
    ) -> None:
        if block_bytes < ALIGNMENT_BYTES or block_bytes % ALIGNMENT_BYTES:
            raise ValueError(f"block_bytes must be a positive multiple of {ALIGNMENT_BYTES}, not {block_bytes}")
        end_reading_ahead()
        self.block_bytes = block_bytes
        self.backend = backend or ThreadsBackend(num_threads=num_threads, uses_cache=uses_cache)
        self._expected = dict(expected or {})
        self._observer = observer
        self._sources: dict[Path, _Source] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._bytes_read = 0

    @property
    def bytes_read(self) -> int:
        """Bytes of the blocks read so far, including alignment margins."""
        return self._bytes_read

    @property
    def buffered_files(self) -> list[Path]:
        """Files that are read through the page cache."""
        with self._lock:
            return [path for path, source in self._sources.items() if not source.file.direct]

    def read_async(self, path: Path, offset: int, buffer: Buffer, required: int | None = None) -> "Future[None]":
        """Start to fill ``buffer`` from ``offset`` (bytes) of the file and return at once.

        Args:
            buffer: writable bytes, 4096-aligned in length and, in host memory, in address; must stay alive until the
                future is done. Device memory only where the backend ``reads_device_memory``.
            required: how many leading bytes must exist; the aligned range may reach past the end of the file.

        The future raises DiskReadError if the file cannot be opened or read, ends before ``required`` bytes, has
        changed since it was opened (ESTALE) or is gone (ENOENT); other errors are raised unchanged.
        """
        _check_aligned(path, offset, buffer)
        if not buffer.nbytes:
            return _ended(None)
        try:
            source = self._open(path, offset)
        except DiskReadError as error:
            return _ended(error)
        block_bytes = self.block_bytes
        if block_bytes >= DEFAULT_BLOCK_BYTES and source.file.in_memory(offset, buffer.nbytes):
            block_bytes = max(block_bytes, _COPY_BYTES)
        chunks = list(self._split(buffer, offset, buffer.nbytes if required is None else required, block_bytes))
        request = _Request(source, offset, len(chunks))
        for chunk in chunks:
            try:
                task = source.file.start(chunk.buffer, chunk.offset)
            except Exception as error:  # closed meanwhile, perhaps; chunks under way may still write to the buffer
                request.tick(error)
            else:
                when_done(task, partial(self._finish_chunk, request, chunk), request.tick)
        return request.future

    def read(self, path: Path, offset: int, buffer: Buffer, required: int | None = None) -> None:
        """Fill ``buffer`` and return when it is full; otherwise as ``read_async``."""
        self.read_async(path, offset, buffer, required).result()

    def close(self) -> None:
        """Cancel reads not started, wait for those under way, close every file; may be called again."""
        with self._lock:
            self._closed = True
        self.backend.close()
        with self._lock:
            for source in self._sources.values():
                source.file.close()
            self._sources.clear()

    def _split(self, buffer: Buffer, offset: int, required: int, block_bytes: int) -> Iterator[_Chunk]:
        for start in range(0, buffer.nbytes, block_bytes):
            part = buffer[start : start + block_bytes]
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
            # Identified before it is opened: a replacement in between is detected after the first read.
            now = FileIdentity.of(path)
            identity = self._expected.get(path, now)
            if now == identity:
                return _Source(self.backend.open(path), identity)
        except OSError as error:
            raise DiskReadError.of(error, path, offset) from error
        raise _changed(identity, now, path, offset)

    def _finish_chunk(self, request: "_Request", chunk: _Chunk, task: "Future[int]") -> None:
        """Count a block's bytes, and report its end to its request."""
        if task.cancelled():
            request.tick(RuntimeError("the reader was closed before the read began"))
            return
        error = task.exception()
        if error is not None:
            request.tick(DiskReadError.of(error, request.path, chunk.offset) if isinstance(error, OSError) else error)
            return
        failure: BaseException | None = request.source.shortfall(chunk, task.result())
        with self._lock:
            self._bytes_read += task.result()
        if failure is None and self._observer is not None:
            failure = self._observer.note(request.path, chunk.offset, chunk.buffer, task.result())
        request.tick(failure)


class _Request:
    """A future that is done with the last block of a range; of several read errors the lowest in the file is raised."""

    def __init__(self, source: _Source, offset: int, num_chunks: int) -> None:
        self.source = source
        self.path = source.file.path
        self.future: Future[None] = Future()
        self._offset = offset
        self._left = num_chunks
        self._failure: BaseException | None = None
        self._lock = threading.Lock()

    def tick(self, failure: BaseException | None) -> None:
        """Note the end of a block. After the last one, check that the file has not changed."""
        with self._lock:
            if self._failure is None or _is_before(failure, self._failure):
                self._failure = failure
            self._left -= 1
            if self._left:
                return
        try:
            if self._failure is None or isinstance(self._failure, DiskReadError):
                self._failure = self.source.change(self._offset) or self._failure
        except BaseException as failure:  # or the caller would wait forever
            self._failure = failure
        _end(self.future, self._failure)


def _is_before(failure: BaseException | None, other: BaseException) -> bool:
    if not (isinstance(failure, DiskReadError) and isinstance(other, DiskReadError)):
        return False
    return failure.offset < other.offset


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
