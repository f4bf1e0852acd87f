"""What of a file the system already holds in memory, in its page cache: after a download, say, or an earlier run."""

import ctypes
import mmap
import os
from typing import Final

_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_LIBC.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
_FAILED: Final = ctypes.c_void_p(-1).value
_PAGE_BYTES: Final = mmap.PAGESIZE


class CachedPages:
    """Tells which bytes of a file are in the page cache, by mincore(2), which reads nothing.

    To those who neither own the file nor may write it the system does not say; for them, and where the file cannot be
    mapped, nothing is cached.

    Args:
        fd: the file, open for reading; it may be closed afterwards.
    """

    def __init__(self, fd: int) -> None:
        self._num_bytes = os.fstat(fd).st_size
        self._address: int | None = None
        if self._num_bytes and _is_told(fd):
            mapped = _LIBC.mmap(None, self._num_bytes, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
            self._address = None if mapped == _FAILED else mapped

    def hold(self, offset: int, num_bytes: int) -> bool:
        """Return whether all of these bytes, as far as the file has them, are cached at this moment."""
        begin = offset - offset % _PAGE_BYTES
        end = min(offset + num_bytes, self._num_bytes)
        if self._address is None or end <= begin:
            return False
        pages = ctypes.create_string_buffer(-(-(end - begin) // _PAGE_BYTES))
        return _LIBC.mincore(self._address + begin, end - begin, pages) == 0 and b"\0" not in pages.raw

    def close(self) -> None:
        """Unmap the file; nothing is cached from then on."""
        if self._address is not None:
            _LIBC.munmap(self._address, self._num_bytes)
            self._address = None


def _is_told(fd: int) -> bool:
    """Return whether mincore(2) tells this process about the file; if not, it says that all is in memory."""
    return os.fstat(fd).st_uid == os.geteuid() or os.access(f"/proc/self/fd/{fd}", os.W_OK)
