"""The input, looked at once before any compute: its hash, how many rows it holds, and that no two rows share an id.

Ids are kept as 64-bit hashes, so that ten million rows cost 160 MB and not gigabytes.
"""

import hashlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from zinfer.jobs.failure import UnusableInput
from zinfer.jobs.rows import Line, Parsed, RowId, id_key, parse_line, read_lines

_MAX_DUPLICATES_NAMED = 5


@dataclass(frozen=True)
class RowIndex:
    """What the first reading of an input found. A row's ordinal counts rows (lines that are not blank) from 0.

    keys: [num_rows] hashes of the ids, by ordinal.
    order: [num_rows] the ordinals sorted by key.
    renamed: ids of unreadable lines whose line number is another row's own id, by line number.
    """

    path: Path
    sha256: str
    size_bytes: int
    keys: NDArray[np.uint64]
    order: NDArray[np.int64]
    renamed: dict[int, str]

    @property
    def num_rows(self) -> int:
        """How many rows the input holds, unusable ones included."""
        return len(self.keys)

    def id_of(self, parsed: Parsed) -> RowId:
        """The id under which a row's output is written."""
        return self.renamed.get(parsed.line, parsed.id)

    def ordinal_of(self, row_id: RowId, guess: int) -> int | None:
        """The ordinal of the row with this id, None if there is none; `guess` is tried first."""
        key = np.uint64(id_key(row_id))
        if guess < self.num_rows and self.keys[guess] == key:
            return guess
        place = int(np.searchsorted(self.keys, key, sorter=self.order))
        if place == self.num_rows or self.keys[self.order[place]] != key:
            return None
        return int(self.order[place])


def scan_input(path: Path) -> RowIndex:
    """Reads the whole input once.

    Raises:
        UnusableInput: it cannot be read, holds no row, or two rows have the same id (both lines are named).
    """
    if not path.exists():
        raise UnusableInput(f"input {path} does not exist")
    if not path.is_file():
        raise UnusableInput(f"input {path} is not a regular file; it is read twice, so write it to a file first")
    try:
        digest, size_bytes = _hash_file(path)
        keys = array("Q", (id_key(parse_line(line).id) for line in read_lines(path)))
    except OSError as error:
        raise UnusableInput(f"input {path} cannot be read: {error.strerror}") from error
    if not keys:
        raise UnusableInput(f"input {path} holds no row; give one JSON object a line")
    keys_N = np.frombuffer(keys, dtype=np.uint64)
    renamed: dict[int, str] = {}
    if shared := _shared_keys(keys_N):
        keys_N = keys_N.copy()
        renamed = _resolve(path, keys_N, shared)
    return RowIndex(path, digest, size_bytes, keys_N, np.argsort(keys_N, kind="stable"), renamed)


def _hash_file(path: Path) -> tuple[str, int]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return digest, file.tell()


def _shared_keys(keys_N: NDArray[np.uint64]) -> set[int]:
    ordered_N = np.sort(keys_N)
    return {int(key) for key in ordered_N[1:][ordered_N[1:] == ordered_N[:-1]]}


def _resolve(path: Path, keys_N: NDArray[np.uint64], shared: set[int]) -> dict[int, str]:
    """Renames unreadable lines that only by their line number share an id; any other sharing is refused.

    Writes the renamed rows' new keys into `keys_N`.
    """
    first: dict[int, Parsed] = {}
    duplicates: list[str] = []
    unreadable: list[tuple[int, Parsed]] = []
    for ordinal, line, parsed in _rows_with(path, shared):
        if parsed.record is None:
            unreadable.append((ordinal, parsed))
            continue
        key = id_key(parsed.id)
        if key in first:
            duplicates.append(_describe(first[key], parsed))
        first.setdefault(key, Parsed(line.number, {"id": parsed.id}, None, parsed.has_own_id))
        if len(duplicates) == _MAX_DUPLICATES_NAMED:
            break
    if duplicates:
        more = " (and perhaps more)" if len(duplicates) == _MAX_DUPLICATES_NAMED else ""
        raise UnusableInput(f"input {path}: every row needs an id of its own; {'; '.join(duplicates)}{more}")
    renamed = {parsed.line: f"line {parsed.line}" for _, parsed in unreadable}
    for ordinal, parsed in unreadable:
        keys_N[ordinal] = id_key(renamed[parsed.line])
    if _shared_keys(keys_N):
        raise UnusableInput(f"input {path}: ids of the form 'line N' clash with the names given to unreadable lines")
    return renamed


def _rows_with(path: Path, shared: set[int]) -> Iterator[tuple[int, Line, Parsed]]:
    for ordinal, line in enumerate(read_lines(path)):
        parsed = parse_line(line)
        if id_key(parsed.id) in shared:
            yield ordinal, line, parsed


def _describe(one: Parsed, other: Parsed) -> str:
    if one.id != other.id:
        return f"the ids {one.id!r} (line {one.line}) and {other.id!r} (line {other.line}) share a hash, rename one"
    if one.has_own_id and other.has_own_id:
        return f"lines {one.line} and {other.line} both have the id {one.id!r}"
    own, bare = (one, other) if one.has_own_id else (other, one)
    return f"line {own.line} has the id {own.id!r}, which is the line number of line {bare.line} that has no id"
