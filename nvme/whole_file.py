"""Writes a file as a whole: whoever reads it finds the old one or the complete new one, after a crash too."""

import os
import secrets
from contextlib import suppress
from pathlib import Path


def replace_file(path: Path, text: str) -> None:
    """Write text to a new file beside ``path``, sync it, and rename it to ``path``.

    Raises:
        OSError: the folder is missing, full or not writable; it names ``path``. Nothing is left behind.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        file = temporary.open("x", encoding="utf-8")  # never over a file that is there already
        try:
            with file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            with suppress(FileNotFoundError):
                temporary.unlink()
        sync_folder(path.parent)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def sync_folder(folder: Path) -> None:
    """Make new names in a folder outlive a power cut.

    Raises:
        OSError: the folder cannot be opened or synced.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
