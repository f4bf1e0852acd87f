"""Alignment arithmetic for direct I/O: offsets, lengths and buffer addresses must be multiples of the logical block.

4096 bytes are a multiple of every logical block size in use (512 and 4096; open(2), "O_DIRECT").
"""

from typing import Final

ALIGNMENT_BYTES: Final = 4096


def align_down(value: int, alignment: int = ALIGNMENT_BYTES) -> int:
    """Return the largest multiple of ``alignment`` that is at most ``value``."""
    return value - value % alignment


def align_up(value: int, alignment: int = ALIGNMENT_BYTES) -> int:
    """Return the smallest multiple of ``alignment`` that is at least ``value``."""
    return -(-value // alignment) * alignment


def covering_range(offset: int, nbytes: int) -> tuple[int, int]:
    """Return the smallest aligned ``(offset, nbytes)`` that covers the byte range."""
    start = align_down(offset)
    return start, align_up(offset + nbytes) - start
