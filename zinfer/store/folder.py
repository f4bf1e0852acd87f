"""The folder that a store is written into: new, empty, or the same store's own beginning; locked by one process."""

import errno
import fcntl
import logging
import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from zinfer.checkpoint.faults import listed
from zinfer.errors import ConfigError
from zinfer.quantization.native.identity import Identity
from zinfer.quantization.native.manifest import JOURNAL_NAME, MANIFEST_NAME, read_manifest
from zinfer.store.atomic_write import temporary_files
from zinfer.store.journal import Journal

log = logging.getLogger(__name__)

_LOCK_NAME: Final = ".zinfer_store.lock"


@dataclass(frozen=True)
class Caller:
    """On whose behalf a store is written.

    Attributes:
        subject: what messages call the folder, before its path.
        option: what states the folder, with its ``article``.
        on_cpu: how to have the weights converted without a GPU.
        waits: for another process that writes there, instead of refusing.
    """

    subject: str
    option: str
    article: str
    on_cpu: str
    waits: bool


COMMAND: Final = Caller("output", "--output", "an", "convert with --device cpu", waits=False)
"""`zinfer quantize`."""


def is_finished(folder: Path, identity: Identity, caller: Caller = COMMAND) -> bool:
    """Whether the folder holds the whole store already, its journal deleted. Writes nothing.

    Raises:
        ConfigError: it holds another one, or is no folder.
        CheckpointError: its manifest is damaged, or does not fit its files.
    """
    if folder.is_symlink() and not folder.exists():
        raise ConfigError(
            f"{caller.subject} {folder} is a link to nothing; make what it points to, or give another {caller.option}"
        )
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{caller.subject} {folder} is not a folder; give another {caller.option}")
    if not (folder / MANIFEST_NAME).is_file() or (folder / JOURNAL_NAME).is_file():
        return False
    _refuse_another(folder, read_manifest(folder).identity, identity, caller)
    return True


@contextmanager
def locked(folder: Path, caller: Caller = COMMAND) -> Iterator[None]:
    """Make the folder where it is absent, and hold its lock; it is the kernel's and ends with the process.

    A folder in which nothing was begun is left as it was found.

    Raises:
        ConfigError: another process writes a store there, and the asker does not wait.
        OSError: the folder cannot be made or written to, or the file system has no locks.
    """
    is_new = not folder.exists()
    descriptor = _lock(folder, caller)
    try:
        yield
    finally:
        if not (folder / JOURNAL_NAME).exists():  # finished, or never begun; a resumed run makes it anew
            with suppress(FileNotFoundError):
                (folder / _LOCK_NAME).unlink()
        os.close(descriptor)
        if is_new:
            with suppress(OSError):  # it is not empty
                folder.rmdir()


def open_journal(folder: Path, identity: Identity, caller: Caller = COMMAND) -> Journal | None:
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
                f"{caller.subject} {folder} holds files that are no store's: {listed(strangers)}; they are left as "
                f"they are: give a new or empty folder as {caller.option}"
            )
        journal = None
    else:
        journal = Journal(folder / JOURNAL_NAME, caller.option)
        _refuse_another(folder, journal.identity, identity, caller)
    for path in temporary_files(folder):
        path.unlink()
    return journal


def _refuse_another(folder: Path, former: Identity, now: Identity, caller: Caller) -> None:
    if differences := former.differences(now):
        lines = "".join(f"\n  {line}" for line in differences)
        raise ConfigError(
            f"{caller.subject} {folder} belongs to another store; what differs:{lines}\n"
            f"Use the former model and settings to go on with that one, give another {caller.option}, or empty the "
            "folder."
        )


def _lock(folder: Path, caller: Caller) -> int:
    """The descriptor that holds the lock."""
    path, how = folder / _LOCK_NAME, fcntl.LOCK_EX | fcntl.LOCK_NB
    while True:
        _make(folder)
        # Another process that ends in between removes the name that this descriptor was opened by, and perhaps the
        # folder.
        with suppress(FileNotFoundError), ExitStack() as owned:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            owned.callback(os.close, descriptor)
            if not _acquire(descriptor, how, folder, caller):
                how = fcntl.LOCK_EX
                _acquire(descriptor, how, folder, caller)
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                owned.pop_all()
                return descriptor


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        if folder.is_symlink():
            raise
        # Also where the folder was there and another process has removed it before `mkdir` could see what it is.
        with suppress(FileNotFoundError):
            if not stat.S_ISDIR(folder.stat().st_mode):
                raise


def _acquire(descriptor: int, how: int, folder: Path, caller: Caller) -> bool:
    """Whether the descriptor has the lock now; False, once and in words, where that has to be waited for."""
    try:
        fcntl.flock(descriptor, how)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            reason = f"{error.strerror}; give {caller.article} {caller.option} on a file system with locks"
            raise OSError(error.errno, reason, str(folder / _LOCK_NAME)) from error
        if not caller.waits:
            what = "is being written by another process; wait for it or end it"
            raise ConfigError(f"{caller.subject} {folder} {what}") from error
        log.warning("%s %s is being written by another process; waiting for it", caller.subject, folder)
        return False
    return True
