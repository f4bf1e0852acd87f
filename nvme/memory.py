"""Memory for fast direct reads: private, anonymous, in huge pages if available."""

import functools
import logging
import mmap

log = logging.getLogger(__name__)


def map_memory(nbytes: int) -> mmap.mmap:
    """Map zeroed, page-aligned memory of ``nbytes`` (rounded up to whole pages), allocated when first touched.

    A direct read of 1 MiB into 4 KiB pages needs 256 addresses, into a huge page one; and 2 MiB pages are touched and
    registered in a fraction of the time. Python's default is a shared mapping: that is tmpfs, slower to touch, and has
    no huge pages on most systems.

    The memory is not mapped in a forked child, where copy-on-write could move a page during a read (open(2),
    "O_DIRECT", on private mappings and fork).

    Raises:
        OSError: there is no more address space.
    """
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_DONTFORK)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:  # a kernel without huge pages
        warn_once(f"no huge pages for host memory ({error.strerror}): loading and disk reads will be slower")
    return memory


@functools.cache
def warn_once(text: str) -> None:
    """Log a warning once per text."""
    log.warning(text)
