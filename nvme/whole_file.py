"""Writes files atomically: readers see the old file or the complete new one, even after a crash."""

import os
import secrets
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def replace_file(path: Path, text: str) -> None:
    """Write a text to ``path``, as `place_file`."""
    place_file(path, [text.encode()])


def place_file(path: Path, pieces: Iterable[bytes | memoryview], temporary: Path | None = None) -> None:
    """Write the pieces to a new file, sync it, drop it from the page cache, and rename it to ``path``.

    Args:
        temporary: the name of the new file until then, in the same folder and unused; by default a random one.

    Raises:
        OSError: the folder is missing, full or not writable; names ``path``. The temporary file is removed.
    """
    temporary = temporary or path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        # O_EXCL: never overwrite an existing file.
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
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


def sync_file(path: Path) -> None:
    """Sync a file's bytes. Raises OSError if they cannot be."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Sync a folder, so that new names in it survive a power cut.

    Raises:
        OSError: the folder cannot be opened or synced.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def cache_folder() -> Path:
    """Return the folder of what is kept between runs: `$XDG_CACHE_HOME/zinfer`, by default `~/.cache/zinfer`."""
    home = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # Relative paths must be ignored (XDG Base Directory Specification).
    return (home if home.is_absolute() else Path.home() / ".cache") / "zinfer"
