"""Identifies a file and its state, to detect changes while it is read.

A write, a truncation and a replacement all change ``stat``; only a write that keeps the size and then restores the old
modification time does not.
"""

import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

# The start of year 10000: a damaged inode may hold a time that `datetime` cannot.
_CALENDAR_END_NS: Final = 253_402_300_800 * 10**9


@dataclass(frozen=True)
class FileIdentity:
    """What ``stat`` returns for a file; equal as long as its bytes are unchanged."""

    device: int
    inode: int
    num_bytes: int
    mtime_ns: int

    @classmethod
    def of(cls, path: Path) -> "FileIdentity":
        """Return the identity of the file at ``path``, following links.

        Raises:
            OSError: there is no such file, or `stat` fails.
        """
        return cls.from_stat(os.stat(path))

    @classmethod
    def from_stat(cls, found: os.stat_result) -> "FileIdentity":
        """Return the identity in a result of `os.stat` or `os.fstat`."""
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)

    @property
    def written_at(self) -> str:
        """When the file was last written, in UTC to the millisecond, for messages."""
        if not 0 <= self.mtime_ns < _CALENDAR_END_NS:
            return f"{self.mtime_ns / 1e9:.3f} s after 1970"
        return datetime.fromtimestamp(self.mtime_ns / 1e9, UTC).isoformat(timespec="milliseconds")

    def difference(self, now: "FileIdentity") -> str:
        """Describe how a later identity of the same path differs, for messages."""
        if now.num_bytes != self.num_bytes:
            return f"{self.num_bytes} bytes then, {now.num_bytes} now"
        if (now.device, now.inode) != (self.device, self.inode):
            return "another file is in its place"
        return f"last written at {self.written_at} then, at {now.written_at} now"
