"""Memory that direct reads land in fast: private, anonymous, in huge pages where the system gives them."""

import functools
import logging
import mmap

log = logging.getLogger(__name__)


def map_memory(nbytes: int) -> mmap.mmap:
    """Zeroed, page-aligned memory of exactly ``nbytes`` (rounded up to whole pages), given when it is first touched.

    A direct read of 1 MiB into pages of 4 KiB is a list of 256 addresses for the disk, into a huge page it is one; and
    pages of 2 MiB are touched and registered in a fraction of the time. Python's default would be a shared mapping:
    that is tmpfs, slower to touch, and has no huge pages on most systems.

    A forked child does not have the memory and must not use it: one that did could take a page away from under a
    read (open(2), "O_DIRECT", on private mappings and fork).

    Raises:
        OSError: the system has no more address space.
    """
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_DONTFORK)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:  # a kernel built without them
        warn_once(f"no huge pages for host memory ({error.strerror}): loading and disk reads will be slower")
    return memory


@functools.cache
def warn_once(text: str) -> None:
    """Log a warning the first time it is given."""
    log.warning(text)
