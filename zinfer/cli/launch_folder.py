"""The folder of one launcher for its ranks' endings and logs."""

import fcntl
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

_PREFIX: Final = "zinfer-ranks-"
_LOCK: Final = "launcher.lock"
_LEAST_AGE_S: Final = 60.0  # a launcher that starts has its folder before it has the lock


@contextmanager
def launch_folder() -> Iterator[Path]:
    """Make a folder, and remove it at the end, with those of launchers that were killed.

    A launcher holds a lock in its folder, because a process number says nothing where containers share the folder.
    """
    _remove_abandoned(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as name, (Path(name) / _LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield Path(name)


def is_in_use(folder: Path) -> bool:
    """Whether the launcher of a folder lives."""
    try:
        with (folder / _LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        pass
    return False


def _remove_abandoned(place: Path) -> None:
    for folder in place.glob(f"{_PREFIX}*"):
        # Also where another user's launcher has its folder, or another start removes it.
        with suppress(OSError), (folder / _LOCK).open() as lock:
            if time.time() - folder.stat().st_mtime > _LEAST_AGE_S:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
