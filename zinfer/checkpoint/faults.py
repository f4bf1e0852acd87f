"""Parts of error messages about checkpoints: names and lists from damaged files, shortened."""

from pathlib import Path

from zinfer.errors import CheckpointError

MAX_LISTED = 8
MAX_NAME = 120


def unreadable(path: Path | str, error: OSError) -> CheckpointError:
    """Return the CheckpointError for an OSError, with its errno and text."""
    reason = f"{error.strerror} (errno {error.errno})"
    return CheckpointError(f"{path}: cannot be read: {reason}: check the path, its permissions and the disk")


def shorten(name: str) -> str:
    """Return a name for a message: quoted, escaped, and shortened if it is huge."""
    if len(name) <= MAX_NAME:
        return repr(name)
    return f"{name[:MAX_NAME]!r}... ({len(name)} characters)"


def listed(names: list[str]) -> str:
    """Return the first few names and the number of others."""
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + more
