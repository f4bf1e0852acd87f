"""Puts a store's files in place. All temporary names begin alike, so that those of a killed process are known."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from zinfer.nvme import whole_file

_PIECE_BYTES: Final = 8 << 20  # at once: a failing disk and the progress show after that much
_TEMPORARY: Final = ".zinfer_store.*.tmp"  # also what `replace_file` makes beside manifest and journal


def place_file(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """As `whole_file.place_file`, under a temporary name that `temporary_files` finds."""
    whole_file.place_file(path, pieces, path.with_name(_TEMPORARY.replace("*", path.name)))


def in_pieces(data: memoryview) -> Iterator[memoryview]:
    """The bytes in parts that one call writes."""
    for begin in range(0, data.nbytes, _PIECE_BYTES):
        yield data[begin : begin + _PIECE_BYTES]


def temporary_files(folder: Path) -> list[Path]:
    """What a killed process may have left in a folder."""
    return sorted(folder.glob(_TEMPORARY))
