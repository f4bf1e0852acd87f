"""Computes which pages a pass copies from host memory to the device, and which it copies back."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from zinfer.scheduling.page_allocator import first_needed
from zinfer.scheduling.schedule import Chunk

Marks = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]
"""One flag per page."""


@dataclass(frozen=True)
class PageTraffic:
    """Runs of neighbouring pages to copy.

    Attributes:
        coming: to the device: pages written before the pass, and gaps that cost less than another copy.
        going: back to the host: pages that the pass writes, and gaps that are on the device, so unchanged.
    """

    coming: tuple[slice, ...]
    going: tuple[slice, ...]


def find_traffic(
    chunks: Sequence[Chunk], num_pages: int, page_size: int, most_gap: int, window: int | None = None
) -> PageTraffic:
    """Return the pages that a pass copies for one layer.

    Args:
        chunks: of the pass.
        num_pages, page_size: of the cache.
        most_gap: largest gap between two pages, in pages, that is copied along with them.
        window: positions that a token of the layer attends to, its own included; None: all before it.
    """
    read, begun, written = (np.zeros(num_pages, dtype=np.bool_) for _ in range(3))
    for sequence, begin, end, *_ in chunks:
        pages = sequence.pages
        first = max(sequence.num_dropped, first_needed(begin, window) // page_size)
        num_held, num_after = -(-begin // page_size), -(-end // page_size)
        read[pages[first:num_held]] = True
        begun[pages[num_held:num_after]] = True
        written[pages[begin // page_size : num_after]] = True
    read &= ~begun  # a page that this pass starts and shares is written in the slot
    coming = _runs(read, most_gap, np.ones(num_pages, dtype=np.bool_))
    present = written.copy()
    for run in coming:
        present[run] = True
    return PageTraffic(coming, _runs(written, most_gap, present))


def _runs(wanted: Marks, most_gap: int, may_move: Marks) -> tuple[slice, ...]:
    """Return runs of the wanted pages, joined over gaps of pages that may be copied."""
    pages = np.flatnonzero(wanted)
    if not len(pages):
        return ()
    barred = np.concatenate([[0], np.cumsum(~may_move)])
    left, right = pages[:-1], pages[1:]
    is_cut = (right - left - 1 > most_gap) | (barred[right] > barred[left])
    begins = pages[np.concatenate([[True], is_cut])]
    ends = pages[np.concatenate([is_cut, [True]])] + 1
    return tuple(slice(int(begin), int(end)) for begin, end in zip(begins, ends, strict=True))
