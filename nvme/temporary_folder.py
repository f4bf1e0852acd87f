"""Temporary folders that are gone in the end, also after a process that was killed."""

import fcntl
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

_PREFIX: Final = "zinfer-"
_LOCK: Final = ".owner.lock"
_MIN_AGE_S: Final = 60.0  # a folder is there before its lock is taken


@contextmanager
def temporary_folder(kind: str, parent: Path | None = None) -> Iterator[Path]:
    """Make the folder ``zinfer-KIND-XXXXXXXX``, and remove it at the end.

    First those in ``parent`` whose owners were killed are removed, of every kind. The owner holds a lock in its folder,
    because a process number says nothing where containers share the disk. On a file system without locks no folder is
    removed by another process.

    Args:
        parent: where the folder is made; None: the system's folder for temporary files.

    Raises:
        OSError: it cannot be made.
    """
    _remove_abandoned(Path(tempfile.gettempdir()) if parent is None else parent)
    made = tempfile.TemporaryDirectory(prefix=f"{_PREFIX}{kind}-", dir=parent)
    with made as name, (Path(name) / _LOCK).open("w") as lock:
        with suppress(OSError):  # the file system has no locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield Path(name)


def is_in_use(folder: Path) -> bool:
    """Whether the owner of a temporary folder lives, or may live: the file system may have no locks."""
    try:
        with (folder / _LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def _remove_abandoned(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        # OSError: the owner lives or is another user, or another start removes the folder.
        with suppress(OSError), (folder / _LOCK).open() as lock:
            if time.time() - folder.stat().st_mtime > _MIN_AGE_S:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
