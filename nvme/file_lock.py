"""Locks files between processes; the kernel releases a lock with the process, however it ends."""

import errno
import fcntl
from io import BufferedWriter


def try_lock(file: BufferedWriter) -> bool:
    """Take the exclusive lock of an open file, held until it is closed; False if another process has it.

    Raises:
        OSError: the file system has no locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True
