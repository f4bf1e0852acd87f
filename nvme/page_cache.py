"""What of a file the system already holds in memory, in its page cache: after a download, say, or an earlier run."""

import ctypes
import mmap
import os
from typing import Final

import numpy as np

_MINCORE: Final = ctypes.CDLL(None, use_errno=True).mincore
_MINCORE.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
_PAGE_BYTES: Final = mmap.PAGESIZE


class CachedPages:
    """Tells which bytes of a file are in the page cache, by mincore(2), which reads nothing.

    To those who neither own the file nor may write it the system does not say; for them nothing is cached.

    Args:
        fd: the file, open for reading; it may be closed afterwards.
    """

    def __init__(self, fd: int) -> None:
        self._num_bytes = os.fstat(fd).st_size
        self._mapped: mmap.mmap | None = None
        if self._num_bytes and _is_told(fd):
            self._mapped = mmap.mmap(fd, 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
            self._address = np.frombuffer(self._mapped, np.uint8).ctypes.data

    def hold(self, offset: int, num_bytes: int) -> bool:
        """Return whether all of these bytes, as far as the file has them, are cached at this moment."""
        begin = offset - offset % _PAGE_BYTES
        end = min(offset + num_bytes, self._num_bytes)
        if self._mapped is None or end <= begin:
            return False
        pages = ctypes.create_string_buffer(-(-(end - begin) // _PAGE_BYTES))
        return _MINCORE(self._address + begin, end - begin, pages) == 0 and b"\0" not in pages.raw

    def close(self) -> None:
        """Unmap the file; nothing is cached from then on."""
        if self._mapped is not None:
            mapped, self._mapped = self._mapped, None
            mapped.close()


def _is_told(fd: int) -> bool:
    """Return whether mincore(2) tells this process about the file; if not, it says that all is in memory."""
    return os.geteuid() in (0, os.fstat(fd).st_uid) or os.access(f"/proc/self/fd/{fd}", os.W_OK)
