"""The folder that a store is written into: new, empty, or the same store's own beginning; locked by one process."""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from zinfer.checkpoint.faults import listed
from zinfer.errors import ConfigError
from zinfer.store.identity import Identity
from zinfer.store.journal import Journal
from zinfer.store.manifest import JOURNAL_NAME, MANIFEST_NAME, read_manifest
from zinfer.store.placing import temporary_files

_LOCK_NAME: Final = ".zinfer_store.lock"


def is_finished(folder: Path, identity: Identity) -> bool:
    """Whether the folder holds the whole store already, its journal deleted. Writes nothing.

    Raises:
        ConfigError: it holds another one, or is no folder.
        CheckpointError: its manifest is damaged, or does not fit its files.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"output {folder} is not a folder; give another --output")
    if not (folder / MANIFEST_NAME).is_file() or (folder / JOURNAL_NAME).is_file():
        return False
    _refuse_another(folder, read_manifest(folder).identity, identity)
    return True


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make the folder where it is absent, and hold its lock; it is the kernel's and ends with the process.

    A folder in which nothing was begun is left as it was found.

    Raises:
        ConfigError: another process writes a store there, or the file system has no locks.
        OSError: the folder cannot be made or written to.
    """
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = _lock(folder / _LOCK_NAME)
    try:
        yield
    finally:
        if not (folder / JOURNAL_NAME).exists():  # finished, or never begun; a resumed run makes it anew
            with suppress(FileNotFoundError):
                (folder / _LOCK_NAME).unlink()
        os.close(descriptor)
        if is_new and not any(folder.iterdir()):
            folder.rmdir()


def open_journal(folder: Path, identity: Identity) -> Journal | None:
    """The journal of the store's beginning, None where nothing was begun; leftovers of killed processes are removed.

    Raises:
        ConfigError: the folder holds something else, or the beginning of another store.
        CheckpointError: the journal is damaged.
    """
    if not (folder / JOURNAL_NAME).is_file():
        own = {folder / _LOCK_NAME, *temporary_files(folder)}
        strangers = sorted(path.name for path in folder.iterdir() if path not in own)
        if strangers:
            raise ConfigError(
                f"output {folder} holds files that are no store's: {listed(strangers)}; they are left as they are: "
                "give a new or empty folder as --output"
            )
        journal = None
    else:
        journal = Journal(folder / JOURNAL_NAME)
        _refuse_another(folder, journal.identity, identity)
    for path in temporary_files(folder):
        path.unlink()
    return journal


def _refuse_another(folder: Path, former: Identity, now: Identity) -> None:
    if differences := former.differences(now):
        lines = "".join(f"\n  {line}" for line in differences)
        raise ConfigError(
            f"output {folder} belongs to another store; what differs:{lines}\n"
            "Use the former model and settings to go on with that one, give another --output, or empty the folder."
        )


def _lock(path: Path) -> int:
    """The descriptor that holds the lock."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Another process that ended in between may have removed the name that this descriptor was opened by.
            if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except OSError as error:
            os.close(descriptor)
            if error.errno in (errno.EAGAIN, errno.EACCES):
                raise ConfigError(
                    f"output {path.parent} is being written by another process; wait for it or end it"
                ) from error
            raise OSError(
                error.errno, f"{error.strerror}; give an --output on a file system with locks", str(path)
            ) from error
        os.close(descriptor)
