"""Parts of error messages about checkpoints: names and lists from damaged files, cut to fit."""

from pathlib import Path

from zinfer.errors import CheckpointError

MAX_LISTED = 8
MAX_NAME = 120


def unreadable(path: Path | str, error: OSError) -> CheckpointError:
    """The error to raise from `error`, with its errno and text."""
    reason = f"{error.strerror} (errno {error.errno})"
    return CheckpointError(f"{path}: cannot be read: {reason}: check the path, its permissions and the disk")


def shorten(name: str) -> str:
    """A name for a message: quoted, escaped, and cut where it is huge."""
    if len(name) <= MAX_NAME:
        return repr(name)
    return f"{name[:MAX_NAME]!r}... ({len(name)} characters)"


def listed(names: list[str]) -> str:
    """The first few names and how many more there are."""
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + more
