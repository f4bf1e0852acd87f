"""Checksums of the pages of weight files, taken as they are read, so that a later process can compare what it reads.

[Note: pages of 4 KiB]
Every range that is read from a weights file begins and ends at a multiple of 4096 bytes. Pages of that size therefore
have the same checksums whatever blocks live where, whatever the sizes of reads, and whatever ranks share the files. A
page is hashed at its first read in a process, in the thread that read it; reads after that cost a look at a bitmap. The
hash is multilinear over 32-bit words (Lemire and Kaser, "Strongly universal string hashing is fast", 2014): two pages
that differ in any way have the same 32 bits with a probability of 2^-32. NumPy computes it without the interpreter's
lock.
"""

import errno
import os
import threading
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from zinfer.nvme.aligned import ALIGNMENT_BYTES
from zinfer.nvme.backend import Buffer
from zinfer.nvme.reader import DiskReadError
from zinfer.weights.checkpoint import Checkpoint
from zinfer.weights.folder import unreadable
from zinfer.weights.header import TensorEntry

State: TypeAlias = tuple[int, int, int]
"""A file's size in bytes, and its times of modification and of any change in ns."""

_SEED: Final = 0x5EED
_SUM_DTYPE: Final = np.dtype("<u4")
_NO_SUM: Final = 0  # of a page that was never read
_PAGES_AT_ONCE: Final = 64  # as much as a core's cache holds, with intermediate results
_HALF: Final = np.uint64(32)
_KEYS: Final = np.random.Generator(np.random.PCG64(_SEED)).integers(
    1 << 64, size=(3, ALIGNMENT_BYTES // 8), dtype=np.uint64
)


@dataclass(frozen=True)
class FileSums:
    """The checksums of a file's pages.

    Attributes:
        state: of the file when all of these pages were as here.
        sums: [pages] little-endian 32-bit checksums; 0: of a page that was not read.
    """

    state: State
    sums: bytes = field(repr=False)


@dataclass(frozen=True)
class NewSums:
    """Pages of a file that a process has read since it last told of them.

    Attributes:
        name, state: of the file.
        ranges: first page and page count of each range, one after another.
        sums: of these pages, as of `FileSums`.
    """

    name: str
    state: State
    ranges: tuple[int, ...]
    sums: bytes = field(repr=False)


class OtherBytes(DiskReadError):
    """Bytes of a file are not those that were read from it, or from its original, before; says which."""

    def __init__(self, path: Path, offset: int, text: str) -> None:
        super().__init__(errno.EIO, text, path, offset)

    def __str__(self) -> str:
        return f"{self.strerror}"


class _File:
    """The checksums of one file, of this process and of those before it."""

    def __init__(self, state: State, recorded: FileSums | None) -> None:
        num_pages = -(-state[0] // ALIGNMENT_BYTES)
        self.state = state
        self.recorded_state = state if recorded is None else recorded.state
        self.sums = np.zeros(num_pages, _SUM_DTYPE)
        if recorded is not None:
            then = np.frombuffer(recorded.sums, _SUM_DTYPE)[:num_pages]
            self.sums[: len(then)] = then
        self.is_done = np.zeros(num_pages, bool)  # read by this process, or known to be as recorded
        if self.state == self.recorded_state:
            self.is_done |= self.sums != _NO_SUM
        self.is_new = np.zeros(num_pages, bool)  # read by this process, and not told of

    def differing(self, pages: npt.NDArray[np.int64], found: npt.NDArray[np.uint32]) -> int | None:
        """Return the first page that is recorded with another checksum; None if none is, and the others are kept."""
        then = self.sums[pages]
        differs = (then != _NO_SUM) & (then != found)
        if differs.any():
            return int(pages[differs][0])
        self.sums[pages] = found
        return None

    def recorded(self) -> FileSums:
        """Return what a later process needs: with the present state only once all pages were compared."""
        is_compared = bool(self.is_done[self.sums != _NO_SUM].all())
        return FileSums(self.state if is_compared else self.recorded_state, self.sums.tobytes())


class PageSums:
    """Observes what a model's readers read; callable from any thread.

    Args:
        recorded: what an earlier process returned from `recorded`: pages of files whose state is as there are not
            hashed, others are compared as they are read.
        remedy: ends the message on a page with another checksum.
    """

    def __init__(self, recorded: Mapping[str, FileSums], remedy: str) -> None:
        self._recorded, self._remedy = dict(recorded), remedy
        self._files: dict[str, _File] = {}
        self._names: dict[Path, str] = {}
        self._tensors: dict[Path, Sequence[TensorEntry]] = {}
        self._lock = threading.Lock()
        self.is_changed = False
        """Whether pages were read since `recorded` returned."""

    def watch(self, checkpoint: Checkpoint, prefix: str = "") -> "PageSums":
        """Observe the files of a checkpoint from now on.

        Args:
            prefix: of the files' names, which are relative to the checkpoint's folder.

        Raises:
            CheckpointError: a file cannot be accessed.
        """
        for path, identity in checkpoint.files.items():
            try:
                state = identity.num_bytes, identity.mtime_ns, os.stat(path).st_ctime_ns
            except OSError as error:
                raise unreadable(path, error) from error
            name = prefix + path.relative_to(checkpoint.folder).as_posix()
            with self._lock:
                self._names[path] = name
                self._tensors[path] = [each for each in checkpoint.tensors.values() if each.file == path]
                if name not in self._files:
                    self._files[name] = _File(state, self._recorded.get(name))
        return self

    def note(self, path: Path, offset: int, buffer: Buffer, num_bytes: int) -> OtherBytes | None:
        """Keep or compare the checksums of pages that were read; see `zinfer.nvme.reader.ReadObserver`."""
        if (name := self._names.get(path)) is None:
            return None
        file = self._files[name]
        first, num_pages = offset // ALIGNMENT_BYTES, -(-num_bytes // ALIGNMENT_BYTES)
        [places] = np.nonzero(~file.is_done[first : first + num_pages])
        if not len(places):
            return None
        data = _host_bytes(buffer)[:num_bytes]
        if left := num_bytes % ALIGNMENT_BYTES:
            if offset + num_bytes != file.state[0]:  # fewer bytes than were asked for, which the reader refuses
                return None
            data = np.concatenate((data, np.zeros(ALIGNMENT_BYTES - left, np.uint8)))
        words = data.view(np.uint64).reshape(num_pages, -1)
        found = page_sums(words if len(places) == num_pages else words[places])
        pages = places + first
        with self._lock:
            if (page := file.differing(pages, found)) is not None:
                return self._difference(path, page)
            file.is_done[pages] = file.is_new[pages] = self.is_changed = True
        return None

    def take_new(self) -> list[NewSums]:
        """Return the pages that were read since the last call, to be merged into those of another process."""
        found = list[NewSums]()
        with self._lock:
            for name, file in self._files.items():
                if file.is_new.any():
                    edges = np.flatnonzero(np.diff(np.concatenate(([False], file.is_new, [False])).astype(np.int8)))
                    edges[1::2] -= edges[0::2]
                    sums = file.sums[file.is_new].tobytes()
                    found.append(NewSums(name, file.state, tuple(map(int, edges)), sums))
                    file.is_new[:] = False
        return found

    def merge(self, several: Sequence[NewSums]) -> tuple[str, int] | None:
        """Add what another process has read.

        Returns:
            a file, and the offset of a page in it, that the two have with different bytes; None if there is none.
        """
        with self._lock:
            for each in several:
                if each.name not in self._files:
                    self._files[each.name] = _File(each.state, self._recorded.get(each.name))
                file = self._files[each.name]
                firsts, counts = np.array(each.ranges, np.int64).reshape(-1, 2).T
                pages = np.concatenate([np.arange(first, first + n) for first, n in zip(firsts, counts, strict=True)])
                if pages[-1] >= len(file.sums):
                    return each.name, int(file.state[0])
                if (page := file.differing(pages, np.frombuffer(each.sums, _SUM_DTYPE))) is not None:
                    return each.name, page * ALIGNMENT_BYTES
                if each.state == file.state:  # not of another host's copy
                    file.is_done[pages] = True
                self.is_changed = True
        return None

    def recorded(self) -> dict[str, FileSums]:
        """Return all that is known, for a later process."""
        with self._lock:
            self.is_changed = False
            return self._recorded | {name: file.recorded() for name, file in self._files.items()}

    def _difference(self, path: Path, page: int) -> OtherBytes:
        begin = page * ALIGNMENT_BYTES
        tensors = self._tensors[path]
        at = max(bisect_right(tensors, begin, key=lambda each: each.offset) - 1, 0)
        names = [each.name for each in tensors[at : at + 2] if each.offset < begin + ALIGNMENT_BYTES]
        names = [name for name, each in zip(names, tensors[at:], strict=False) if each.offset + each.nbytes > begin]
        where = f", in {' or '.join(names)}" if names else ""
        return OtherBytes(
            path,
            begin,
            f"model {path} holds other weights than when this job began (bytes {begin} to {begin + ALIGNMENT_BYTES}"
            f"{where}, have another checksum); {self._remedy}",
        )


def page_sums(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint32]:
    """Return the checksum of each page, which is never 0.

    Args:
        words: [pages, 512] their bytes.
    """
    low, high, start = _KEYS
    found = np.empty(len(words), np.uint64)
    for begin in range(0, len(words), _PAGES_AT_ONCE):
        part = words[begin : begin + _PAGES_AT_ONCE]
        # Of a word's halves l and h: low * (l + h * 2^32) + high * h, whose two factors are independent of each other.
        found[begin : begin + _PAGES_AT_ONCE] = part @ low + (part >> _HALF) @ high
    sums: npt.NDArray[np.uint32] = np.maximum((found + start[0]) >> _HALF, 1).astype(_SUM_DTYPE)
    return sums


def _host_bytes(buffer: Any) -> npt.NDArray[np.uint8]:
    """Return a buffer's bytes in host memory; device memory, which GPUDirect Storage fills, is copied once."""
    return np.frombuffer(buffer if isinstance(buffer, memoryview) else buffer.cpu().numpy().data, np.uint8)
