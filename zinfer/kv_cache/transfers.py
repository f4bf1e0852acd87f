"""Which pages a pass reads and which it writes, where they come from host memory and go back there."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from zinfer.scheduling.page_allocator import first_needed
from zinfer.scheduling.schedule import Chunk

Marks = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]
"""One a page."""


@dataclass(frozen=True)
class PageTraffic:
    """Runs of neighbouring pages.

    Attributes:
        coming: that hold what was written before the pass, and pages between them that cost less than another copy.
        going: that hold what the pass writes, and pages between them that came with it, so that they go as they are.
    """

    coming: tuple[slice, ...]
    going: tuple[slice, ...]


def find_traffic(
    chunks: Sequence[Chunk], num_pages: int, page_size: int, most_gap: int, window: int | None = None
) -> PageTraffic:
    """What a pass moves for one layer.

    Args:
        chunks: of the pass.
        num_pages, page_size: of the cache.
        most_gap: pages between two that are moved that are moved along rather than left out.
        window: positions that a token of the layer attends to, its own among them; None: all before it.
    """
    read, begun, written = (np.zeros(num_pages, dtype=np.bool_) for _ in range(3))
    for sequence, begin, end, _ in chunks:
        pages = sequence.pages
        first = max(sequence.num_dropped, first_needed(begin, window) // page_size)
        num_held, num_after = -(-begin // page_size), -(-end // page_size)
        read[pages[first:num_held]] = True
        begun[pages[num_held:num_after]] = True
        written[pages[begin // page_size : num_after]] = True
    read &= ~begun  # a page that this pass begins and shares is in the slot already
    coming = _runs(read, most_gap, np.ones(num_pages, dtype=np.bool_))
    present = written.copy()
    for run in coming:
        present[run] = True
    return PageTraffic(coming, _runs(written, most_gap, present))


def _runs(wanted: Marks, most_gap: int, may_move: Marks) -> tuple[slice, ...]:
    """Runs of the wanted pages, joined over gaps of pages that may be moved."""
    pages = np.flatnonzero(wanted)
    if not len(pages):
        return ()
    barred = np.concatenate([[0], np.cumsum(~may_move)])
    left, right = pages[:-1], pages[1:]
    is_cut = (right - left - 1 > most_gap) | (barred[right] > barred[left])
    begins = pages[np.concatenate([[True], is_cut])]
    ends = pages[np.concatenate([is_cut, [True]])] + 1
    return tuple(slice(int(begin), int(end)) for begin, end in zip(begins, ends, strict=True))
