"""The folder that a store is written into: new, empty, or with the same store unfinished; locked by one process."""

import fcntl
import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

from zinfer.checkpoint.faults import listed
from zinfer.errors import ConfigError
from zinfer.nvme import whole_file
from zinfer.nvme.file_lock import try_lock
from zinfer.quantization.native.identity import Identity
from zinfer.quantization.native.manifest import MANIFEST_NAME, Manifest

log = logging.getLogger(__name__)

LOCK_NAME: Final = ".zinfer_store.lock"
TEMPORARY: Final = ".zinfer_store.*.tmp"
"""Matches the temporary files that a killed writer may leave."""


@dataclass(frozen=True)
class Caller:
    """The words of messages for the caller that writes a store.

    Attributes:
        subject: the name of the folder in messages, before its path.
        option: the option or key that names the folder.
        on_cpu: how to convert the weights without a GPU.
        waits: whether to wait for another process that writes there, instead of refusing.
    """

    subject: str
    option: str
    on_cpu: str
    waits: bool


COMMAND: Final = Caller("output", "--output", "convert with --device cpu", waits=False)
"""`zinfer quantize`."""


def find_manifest(folder: Path, identity: Identity, caller: Caller = COMMAND) -> Manifest | None:
    """Return the manifest of the store in a folder, finished or not; None if there is none. Writes nothing.

    Raises:
        ConfigError: the path is not a folder, or holds another store or other files.
        CheckpointError: the manifest is damaged, or does not match the files of a finished store.
    """
    if folder.is_symlink() and not folder.exists():
        raise ConfigError(
            f"{caller.subject} {folder} is a link to nothing; make what it points to, or give another {caller.option}"
        )
    if not folder.exists():
        return None
    if not folder.is_dir():
        raise ConfigError(f"{caller.subject} {folder} is not a folder; give another {caller.option}")
    names = os.listdir(folder)  # before the check for a manifest: another process may start the store meanwhile
    if not (folder / MANIFEST_NAME).is_file():
        if strangers := sorted(name for name in names if name != LOCK_NAME and not fnmatch(name, TEMPORARY)):
            raise ConfigError(
                f"{caller.subject} {folder} holds files that are no store's: {listed(strangers)}; they are left as "
                f"they are: give a new or empty folder as {caller.option}"
            )
        return None
    manifest = Manifest.read(folder)
    if differences := manifest.identity.differences(identity):
        lines = "".join(f"\n  {line}" for line in differences)
        raise ConfigError(
            f"{caller.subject} {folder} belongs to another store; what differs:{lines}\n"
            f"Use the former model and settings to go on with that one, give another {caller.option}, or empty the "
            "folder."
        )
    if manifest.finished:
        manifest.check_files(folder)
    return manifest


def place_file(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """As `whole_file.place_file`, with a temporary name that ``TEMPORARY`` matches."""
    whole_file.place_file(path, pieces, path.with_name(TEMPORARY.replace("*", path.name)))


@contextmanager
def locked(folder: Path, caller: Caller = COMMAND) -> Iterator[None]:
    """Create the folder if needed and hold its lock, which the kernel releases with the process.

    Only the writer that finishes the store removes the lock file; writers that waited for it then find the store.

    Raises:
        ConfigError: another process writes a store there, and the caller does not wait.
        OSError: the folder cannot be made or written to, or the file system has no locks.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK_NAME).open("ab") as file:
        try:
            is_locked = try_lock(file)
        except OSError as error:
            reason = f"{error.strerror}; give another {caller.option}, on a file system with locks"
            raise OSError(error.errno, reason, str(folder / LOCK_NAME)) from error
        if not is_locked:
            if not caller.waits:
                what = "is being written by another process; wait for it or end it"
                raise ConfigError(f"{caller.subject} {folder} {what}")
            log.warning("%s %s is being written by another process; waiting for it", caller.subject, folder)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
