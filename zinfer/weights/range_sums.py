"""Checksums of what is read of weight files, taken as it is read, so that a later process can compare what it reads.

[Note: ranges as they are read]
A range is hashed at its first read in a process, in the thread that read it, by one call that leaves the interpreter's
lock to others: a hash of each page, by NumPy, held 32 reading threads to 1.3 GB/s on 16 cores, for they waited for that
lock (26 GB/s now). A later process may read other ranges, since blocks live elsewhere or other ranks read them. Where
the file is as it was recorded nothing is compared. Where it is not, the recorded ranges that a read touches are read
once more and compared.
"""

import errno
import os
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import xxhash

from zinfer.nvme.aligned import ALIGNMENT_BYTES
from zinfer.nvme.backend import Buffer
from zinfer.nvme.reader import DiskReadError
from zinfer.weights.checkpoint import Checkpoint
from zinfer.weights.folder import unreadable
from zinfer.weights.header import TensorEntry

State: TypeAlias = tuple[int, int, int]
"""A file's size in bytes, and its times of modification and of any change in ns."""
Range: TypeAlias = tuple[int, int]
"""Offset and length in bytes."""

_RECORD: Final = np.dtype([("offset", "<u8"), ("num_bytes", "<u8"), ("sum", "<u8")])
_MAX_NAMES: Final = 2  # of tensors in a message


@dataclass(frozen=True)
class FileSums:
    """The checksums of a file's ranges.

    Attributes:
        state: of the file when all of these ranges were as here.
        records: offset, length and xxh3_64 of each range, little-endian 64-bit integers, by offset.
    """

    state: State
    records: bytes = field(repr=False)


@dataclass(frozen=True)
class NewSums:
    """Ranges of a file that a process has read since it last told of them; as `FileSums`, with the file's name."""

    name: str
    state: State
    records: bytes = field(repr=False)


class OtherBytes(DiskReadError):
    """Bytes of a file are not those that were read from it, or from its original, before; says which."""

    def __init__(self, path: Path, offset: int, text: str) -> None:
        super().__init__(errno.EIO, text, path, offset)

    def __str__(self) -> str:
        return f"{self.strerror}"


class _File:
    """The checksums of one file, of this process and of those before it.

    Attributes:
        sums: by range.
        done: ranges that this process has read, or that are known to be as recorded.
        pending: recorded ranges that are to be compared.
    """

    def __init__(self, state: State, recorded: FileSums | None) -> None:
        self.state = state
        self.recorded_state = state if recorded is None else recorded.state
        self.sums: dict[Range, int] = {} if recorded is None else dict(_unpacked(recorded.records))
        self.done = set(self.sums) if self.state == self.recorded_state else set[Range]()
        self.pending = self.sums.keys() - self.done
        self.new: set[Range] = set()
        self._by_offset = sorted(self.pending)
        self._max_bytes = max((num_bytes for _, num_bytes in self.pending), default=0)

    def to_compare(self, offset: int, num_bytes: int) -> list[Range]:
        """Return the pending ranges that have a byte of this one."""
        first = bisect_left(self._by_offset, (offset - self._max_bytes, 0))
        last = bisect_left(self._by_offset, (offset + num_bytes, 0))
        return [each for each in self._by_offset[first:last] if sum(each) > offset and each in self.pending]

    def keep(self, found: Mapping[Range, int], state: State) -> Range | None:
        """Return a range that is known with another checksum; None if there is none, and all are kept.

        Args:
            state: of the file that they were read from, which may be another host's copy.
        """
        for each, checksum in found.items():
            if self.sums.get(each, checksum) != checksum:
                return each
        if state == self.state:
            self.done |= found.keys()
            self.pending -= found.keys()
        self.sums.update(found)
        return None

    def recorded(self) -> FileSums:
        """Return what a later process needs: with the present state only once all ranges were compared."""
        return FileSums(self.recorded_state if self.pending else self.state, _packed(self.sums, self.sums))


class RangeSums:
    """Observes what a model's readers read; callable from any thread.

    Args:
        recorded: what an earlier process returned from `recorded`: ranges of files whose state is as there are not
            hashed, those of others are compared as their bytes are read.
        remedy: ends the message on a range with another checksum.
    """

    def __init__(self, recorded: Mapping[str, FileSums], remedy: str) -> None:
        self._recorded, self._remedy = dict(recorded), remedy
        self._files: dict[str, _File] = {}
        self._names: dict[Path, str] = {}
        self._tensors: dict[Path, Sequence[TensorEntry]] = {}
        self._lock = threading.Lock()
        self.is_changed = False
        """Whether ranges were read since `recorded` returned."""

    def watch(self, checkpoint: Checkpoint, prefix: str = "") -> "RangeSums":
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

    def note(self, path: Path, offset: int, buffer: Buffer, num_bytes: int) -> DiskReadError | None:
        """Keep or compare the checksum of a range that was read; see `zinfer.nvme.reader.ReadObserver`."""
        if (name := self._names.get(path)) is None:
            return None
        file, own = self._files[name], (offset, num_bytes)
        if own in file.done:
            return None
        if num_bytes % ALIGNMENT_BYTES and offset + num_bytes != file.state[0]:
            return None  # fewer bytes than were asked for, which the reader refuses
        found = {own: xxhash.xxh3_64_intdigest(_host_bytes(buffer)[:num_bytes])}
        with self._lock:
            others = [each for each in file.to_compare(offset, num_bytes) if each != own]
        try:
            found |= {each: _sum_of(path, *each) for each in others}
        except OSError as error:
            return DiskReadError.of(error, path, offset)
        with self._lock:
            if (other := file.keep(found, file.state)) is not None:
                return self._difference(path, other)
            file.new |= found.keys()
            self.is_changed = True
        return None

    def take_new(self) -> list[NewSums]:
        """Return the ranges that were read since the last call, to be merged into those of another process."""
        found = list[NewSums]()
        with self._lock:
            for name, file in self._files.items():
                if file.new:
                    found.append(NewSums(name, file.state, _packed(file.sums, file.new)))
                    file.new.clear()
        return found

    def merge(self, several: Sequence[NewSums]) -> tuple[str, int] | None:
        """Add what another process has read.

        Returns:
            a file, and the offset of a range in it, that the two have with different bytes; None if there is none.
        """
        with self._lock:
            for each in several:
                if each.name not in self._files:
                    self._files[each.name] = _File(each.state, self._recorded.get(each.name))
                file, found = self._files[each.name], dict(_unpacked(each.records))
                if max(map(sum, found)) > file.state[0]:
                    return each.name, file.state[0]
                if (other := file.keep(found, each.state)) is not None:
                    return each.name, other[0]
                self.is_changed = True
        return None

    def recorded(self) -> dict[str, FileSums]:
        """Return all that is known, for a later process."""
        with self._lock:
            self.is_changed = False
            return self._recorded | {name: file.recorded() for name, file in self._files.items()}

    def _difference(self, path: Path, other: Range) -> OtherBytes:
        begin, end = other[0], sum(other)
        tensors = self._tensors[path]
        first = max(bisect_right(tensors, begin, key=lambda each: each.offset) - 1, 0)
        last = bisect_left(tensors, end, key=lambda each: each.offset)
        names = [each.name for each in tensors[first:last] if each.offset + each.nbytes > begin]
        where = f", in {' or '.join(names[:_MAX_NAMES])}" if names else ""
        more = f" or {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
        return OtherBytes(
            path,
            begin,
            f"model {path} holds other weights than when this job began (bytes {begin} to {end}{where}{more}, have "
            f"another checksum); {self._remedy}",
        )


def _packed(sums: Mapping[Range, int], ranges: Iterable[Range]) -> bytes:
    return np.array([(*each, sums[each]) for each in sorted(ranges)], _RECORD).tobytes()


def _unpacked(records: bytes) -> Iterator[tuple[Range, int]]:
    for offset, num_bytes, checksum in np.frombuffer(records, _RECORD).tolist():
        yield (offset, num_bytes), checksum


def _sum_of(path: Path, offset: int, num_bytes: int) -> int:
    """Return the checksum of a range that is read for it alone. Raises OSError: it cannot be read."""
    digest = xxhash.xxh3_64()
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        while num_bytes and (data := file.read(num_bytes)):
            digest.update(data)
            num_bytes -= len(data)
    return digest.intdigest()


def _host_bytes(buffer: Any) -> memoryview:
    """Return a buffer's bytes in host memory; device memory, which GPUDirect Storage fills, is copied once."""
    return buffer if isinstance(buffer, memoryview) else memoryview(buffer.cpu().numpy().data)
