"""Puts large files in place as a whole: a temporary file beside them, synced, then renamed.

All temporary names begin alike, so that those of a killed process are known for what they are.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from zinfer.nvme.whole_file import sync_folder

_PIECE_BYTES: Final = 8 << 20  # at once: a failing disk and the progress show after that much
_TEMPORARY: Final = ".zinfer_store.*.tmp"  # also what `replace_file` makes beside manifest and journal


def place_file(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """Write the pieces to a new file and rename it to ``path``; it takes no room in the page cache afterwards.

    Raises:
        OSError: the disk is full or failed; it names ``path``. Nothing is left behind.
    """
    temporary = path.with_name(_TEMPORARY.replace("*", path.name))
    try:
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
            try:
                for piece in pieces:
                    while piece:
                        piece = piece[os.write(descriptor, piece) :]
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
            temporary.replace(path)
        finally:
            with suppress(FileNotFoundError):
                temporary.unlink()
        sync_folder(path.parent)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def in_pieces(data: memoryview) -> Iterator[memoryview]:
    """The bytes in parts that one call writes."""
    for begin in range(0, data.nbytes, _PIECE_BYTES):
        yield data[begin : begin + _PIECE_BYTES]


def temporary_files(folder: Path) -> list[Path]:
    """What a killed process may have left in a folder."""
    return sorted(folder.glob(_TEMPORARY))
