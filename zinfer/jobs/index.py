"""Scan the input before any compute: hash it, count its rows, and check that their ids are unique.

Ids are kept as 64-bit hashes and lines as 32-bit checksums: ten million rows take 200 MB, not gigabytes.
"""

import hashlib
import stat
import zlib
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from io import BufferedReader
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from zinfer.errors import JobError
from zinfer.jobs.request import UnusableInput
from zinfer.jobs.rows import Line, Parsed, RowId, id_key, lines_of, parse_line

_MAX_DUPLICATES_NAMED = 5


@dataclass(frozen=True)
class RowIndex:
    """Index of an input file. A row's ordinal counts rows (lines that are not blank) from 0.

    name: of the input in messages.
    keys: [num_rows] hashes of the ids, by ordinal.
    sums: [num_rows] checksums of the lines, by ordinal.
    order: [num_rows] the ordinals sorted by key.
    renamed: replacement ids, by line number, of unreadable lines whose line number is another row's own id.
    """

    path: Path
    name: Path
    sha256: str
    size_bytes: int
    keys: NDArray[np.uint64]
    sums: NDArray[np.uint32]
    order: NDArray[np.int64]
    renamed: dict[int, str]

    @property
    def num_rows(self) -> int:
        """Number of rows in the input, unusable ones included."""
        return len(self.keys)

    def id_of(self, parsed: Parsed) -> RowId:
        """Return the id of a row in the output."""
        return self.renamed.get(parsed.line, parsed.id)

    def ordinal_of(self, row_id: RowId, guess: int) -> int | None:
        """Return the ordinal of the row with this id, or None; `guess` is tried first."""
        key = np.uint64(id_key(row_id))
        if guess < self.num_rows and self.keys[guess] == key:
            return guess
        place = int(np.searchsorted(self.keys, key, sorter=self.order))
        if place == self.num_rows or self.keys[self.order[place]] != key:
            return None
        return int(self.order[place])

    def lines(self) -> Iterator[Line]:
        """Read the rows' lines again, in order, and check each against the index.

        Raises:
            JobError: a line differs from the scanned one.
            OSError: it cannot be read.
        """
        with self.path.open("rb") as file:
            num_rows = 0
            for num_rows, line in enumerate(lines_of(file), start=1):
                if num_rows > self.num_rows or _line_sum(line) != self.sums[num_rows - 1]:
                    raise self._changed()
                yield line
            if num_rows < self.num_rows:
                raise self._changed()

    def _changed(self) -> JobError:
        return JobError(
            f"input {self.name} was changed while the job ran; the rows written so far belong to the former input. "
            "Restore it and run the same command again, or use --restart"
        )


def scan_input(
    path: Path,
    *,
    name: Path | None = None,
    may_be_empty: bool = False,
    check: Callable[[Parsed], None] = lambda parsed: None,
) -> RowIndex:
    """Read the whole input and return its index.

    Args:
        name: of the input in messages; None: the path.
        check: called with each line; may raise UnusableInput.

    Raises:
        UnusableInput: it cannot be read, holds no row, or two rows have the same id (names both lines); by ``check``.
        JobError: it changed during the scan.
    """
    name = name or path
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise UnusableInput(f"input {name} is not a regular file; it is read twice, so write it to a file first")
        index = _scan(path, name, check)
        if not index.num_rows and not may_be_empty:
            raise UnusableInput(f"input {name} holds no row; give one JSON object a line")
        shared = _shared_keys(index.keys)
        return _resolved(index, shared) if shared else index
    except FileNotFoundError as error:
        raise UnusableInput(f"input {name} does not exist") from error
    except OSError as error:
        raise UnusableInput(f"input {name} cannot be read: {error.strerror} (errno {error.errno})") from error


def _scan(path: Path, name: Path, check: Callable[[Parsed], None]) -> RowIndex:
    digest, keys, sums = hashlib.sha256(), array("Q"), array("I")
    with path.open("rb") as file:
        for line in lines_of(_hashed(file, digest)):
            parsed = parse_line(line)
            check(parsed)
            keys.append(id_key(parsed.id))
            sums.append(_line_sum(line))
        size_bytes = file.tell()
    keys_N, sums_N = np.frombuffer(keys, dtype=np.uint64), np.frombuffer(sums, dtype=np.uint32)
    order_N = np.argsort(keys_N, kind="stable")
    return RowIndex(path, name, digest.hexdigest(), size_bytes, keys_N, sums_N, order_N, {})


def _hashed(file: BufferedReader, digest: "hashlib._Hash") -> Iterator[bytes]:
    for data in file:
        digest.update(data)
        yield data


def _line_sum(line: Line) -> int:
    return zlib.crc32(line.data, line.number & 0xFFFFFFFF)


def _shared_keys(keys_N: NDArray[np.uint64]) -> set[int]:
    ordered_N = np.sort(keys_N)
    return {int(key) for key in ordered_N[1:][ordered_N[1:] == ordered_N[:-1]]}


def _resolved(index: RowIndex, shared: set[int]) -> RowIndex:
    """Rename unreadable lines whose line number is another row's id; refuse all other duplicates."""
    path, keys_N = index.name, index.keys.copy()
    first: dict[int, Parsed] = {}
    duplicates: list[str] = []
    first_line: int | None = None
    renamed: dict[int, str] = {}
    for ordinal, line in enumerate(index.lines()):
        parsed = parse_line(line)
        key = id_key(parsed.id)
        if key not in shared:
            continue
        if parsed.record is None:
            renamed[line.number] = f"line {line.number}"
            keys_N[ordinal] = id_key(renamed[line.number])
        elif key in first:
            duplicates.append(_describe(first[key], parsed))
            first_line = first_line or line.number
            if len(duplicates) == _MAX_DUPLICATES_NAMED:
                duplicates[-1] += " (and perhaps more)"
                break
        else:
            # Not the record, which may be large; of it only what tells the format.
            first[key] = Parsed(line.number, {"custom_id": ""} if parsed.is_openai else {}, own_id=parsed.own_id)
    if duplicates:
        raise UnusableInput(f"input {path}: every row needs an id of its own; {'; '.join(duplicates)}", first_line)
    if _shared_keys(keys_N):
        raise UnusableInput(f"input {path}: ids of the form 'line N' clash with the names given to unreadable lines")
    return replace(index, keys=keys_N, order=np.argsort(keys_N, kind="stable"), renamed=renamed)


def _describe(one: Parsed, other: Parsed) -> str:
    if one.own_id is not None and other.own_id is not None:
        name = "custom_id" if one.is_openai and other.is_openai else "id"
        return f"lines {one.line} and {other.line} both have the {name} {one.id!r}"
    own, bare = (other, one) if one.own_id is None else (one, other)
    return f"line {own.line} has the id {own.id!r}, which is the line number of line {bare.line} that has no id"
