"""The folder of a server's files and batches, which no other server uses meanwhile."""

from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedWriter
from pathlib import Path
from typing import Final

from zinfer.errors import ConfigError
from zinfer.nvme.file_lock import try_lock

_LOCK_NAME: Final = ".zinfer_serve.lock"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make the folder if it is missing and hold its lock, which the kernel releases with the process.

    The lock's file stays: a server that starts while another ends must find the same one.

    Raises:
        ConfigError: another server uses the folder, or it cannot be made, written to or locked.
    """
    try:
        file = _open_locked(folder)
    except OSError as error:
        raise ConfigError(
            f"--files {folder} cannot be used: {error.strerror} (errno {error.errno}); give another --files, a folder "
            "that may be made and written to, on a file system with locks"
        ) from error
    with file:
        yield


def _open_locked(folder: Path) -> BufferedWriter:
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--files {folder} is not a folder; give another --files")
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / _LOCK_NAME).open("ab")
    try:
        if not try_lock(file):
            raise ConfigError(f"--files {folder} is used by another server; give another --files, or end that server")
    except BaseException:
        file.close()
        raise
    return file
