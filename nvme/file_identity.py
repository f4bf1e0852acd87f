"""Which file a path stood for, and in which state, so that a file that changes under a reader is noticed.

A write, a truncation and a replacement all show in ``stat``; only a write that keeps the size and then sets the old
modification time back does not.
"""

import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

# Of the year 9999; the times of a damaged inode may lie beyond what a date can say.
_CALENDAR_END_NS: Final = 253_402_300_800 * 10**9


@dataclass(frozen=True)
class FileIdentity:
    """What ``stat`` says of a file; equal for two moments between which nobody touched its bytes."""

    device: int
    inode: int
    num_bytes: int
    mtime_ns: int

    @classmethod
    def of(cls, path: Path) -> "FileIdentity":
        """The file that ``path`` stands for now, links followed.

        Raises:
            OSError: there is none, or it cannot be looked at.
        """
        return cls.from_stat(os.stat(path))

    @classmethod
    def from_stat(cls, found: os.stat_result) -> "FileIdentity":
        """The file that was looked at, by path or descriptor."""
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)

    @property
    def written_at(self) -> str:
        """The moment of the last write, in UTC to the millisecond, for people."""
        return _moment(self.mtime_ns)

    def difference(self, now: "FileIdentity") -> str:
        """In what a later identity of the same path differs, for people."""
        if now.num_bytes != self.num_bytes:
            return f"{self.num_bytes} bytes then, {now.num_bytes} now"
        if (now.device, now.inode) != (self.device, self.inode):
            return "another file stands in its place"
        return f"last written at {self.written_at} then, at {now.written_at} now"


def _moment(time_ns: int) -> str:
    if not 0 <= time_ns < _CALENDAR_END_NS:
        return f"{time_ns / 1e9:.3f} s after 1970"
    return datetime.fromtimestamp(time_ns / 1e9, UTC).isoformat(timespec="milliseconds")
