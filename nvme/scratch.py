"""Temporary storage on a disk: places of equal size in an unnamed file, which is gone however the process ends."""

import errno
import fcntl
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from zinfer.nvme.aligned import ALIGNMENT_BYTES

_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class ScratchError(OSError):
    """The file could not be written, read or extended; names the file, the bytes and the remedy."""


class ScratchFile:
    """A file of places that one thread takes, writes, reads and frees, with direct I/O if the disk allows it.

    Args:
        folder: holds the file; created if needed.
        place_bytes: size of a place, a multiple of 4096.

    ``bytes_written`` and ``bytes_read`` count the bytes so far.

    Raises:
        ScratchError: the file cannot be made.
    """

    def __init__(self, folder: Path, place_bytes: int) -> None:
        assert place_bytes >= ALIGNMENT_BYTES
        assert place_bytes % ALIGNMENT_BYTES == 0
        self.place_bytes = place_bytes
        self.bytes_written = 0
        self.bytes_read = 0
        self._folder = folder
        self._free: list[int] = []
        self._num_places = 0
        self._path = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._fd, name = tempfile.mkstemp(prefix="zinfer-", dir=folder)
        except OSError as error:
            raise self._failure(error, "making it") from error
        self._path = Path(name)
        self.close = weakref.finalize(self, os.close, self._fd)
        """Close and thereby delete the file; may be called again."""
        try:
            self._path.unlink()
        except OSError as error:
            raise self._failure(error, "unlinking it") from error
        self._set_direct(True)

    @property
    def path(self) -> Path:
        """A path by which this process can open the file again (proc_pid_fd(5)), until it is closed."""
        return Path(f"/proc/self/fd/{self._fd}")

    def take(self, count: int) -> list[int]:
        """Allocate places: freed ones first, then new ones.

        Raises:
            ScratchError: the disk has no room for new ones.
        """
        num_new = count - len(self._free)
        if num_new > 0:
            self._check_room(num_new * self.place_bytes)
            self._free += range(self._num_places, self._num_places + num_new)
            self._num_places += num_new
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def give_back(self, places: Sequence[int]) -> None:
        """Free the places."""
        self._free = sorted([*self._free, *places])

    def write(self, places: Sequence[int], memory: memoryview) -> None:
        """Write the places in order from ``memory`` (page-aligned, as long as the places together).

        Raises:
            ScratchError: the disk is full or failed.
        """
        self._move(os.pwritev, places, memory, "writing")
        self.bytes_written += memory.nbytes

    def read(self, places: Sequence[int], memory: memoryview) -> None:
        """Read the places in order into ``memory``, likewise.

        Raises:
            ScratchError: the disk failed.
        """
        self._move(os.preadv, places, memory, "reading")
        self.bytes_read += memory.nbytes

    def _move(
        self,
        call: Callable[[int, Sequence[memoryview], int], int],
        places: Sequence[int],
        memory: memoryview,
        doing: str,
    ) -> None:
        assert memory.nbytes == len(places) * self.place_bytes
        begin = 0
        for first, count in _runs(places):
            end = begin + count * self.place_bytes
            offset = first * self.place_bytes - begin  # in the file, minus the position in memory
            while begin < end:
                try:
                    moved = call(self._fd, [memory[begin:end]], offset + begin)
                except OSError as error:
                    if error.errno == errno.EINVAL and self._set_direct(False):
                        continue  # the file system accepts O_DIRECT but refuses direct I/O
                    raise self._failure(error, f"{doing} {end - begin} bytes at byte {offset + begin}") from error
                if moved == 0:
                    nothing = OSError(errno.EIO, "the disk moved nothing and gave no error")
                    raise self._failure(nothing, f"{doing} {end - begin} bytes at byte {offset + begin}")
                begin += moved

    def _check_room(self, nbytes: int) -> None:
        found = os.fstatvfs(self._fd)
        free = found.f_bavail * found.f_frsize
        if free < nbytes:
            reason = f"{nbytes:,} bytes more are needed in {self._folder}, {free:,} are free there"
            raise self._failure(OSError(errno.ENOSPC, reason), "growing")

    def _failure(self, error: OSError, doing: str) -> ScratchError:
        remedy = "make room there, or name another folder" if error.errno in _FULL else "check the folder and its disk"
        code = error.errno or errno.EIO
        return ScratchError(code, f"{doing}: {error.strerror or os.strerror(code)}; {remedy}", str(self._path))

    def _set_direct(self, direct: bool) -> bool:
        """Turn direct I/O on or off; returns whether the setting changed."""
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        wanted = flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, wanted)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return False
        return wanted != flags


def _runs(places: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield runs of neighbouring places, as the first place and the number of places."""
    begin = 0
    for index in range(1, len(places) + 1):
        if index == len(places) or places[index] != places[index - 1] + 1:
            yield places[begin], index - begin
            begin = index
