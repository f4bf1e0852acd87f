"""What the sequences that are not finished need together, and how fast they had best be begun.

[Note: pace] Where prompts filled all pages at once, texts would all end at once too, and passes between would carry
decodes alone: those are over long before streamed weights are there. So passes carry no more than what keeps all pages
in use for ever: as many prompts as texts end in a pass, when those that fit the pool are of all ages. Where all that
wait fit at once, nothing comes after them, and the sooner they begin the fewer passes there are.
"""

from typing import Final

from zinfer.scheduling.sequence import Sequence
from zinfer.scheduling.shared_prefixes import SharedPrefixCounter

_LEAST_PACE: Final = 8192
"""Tokens that a pass may always carry: about what a GPU computes while 16-bit weights cross its link."""


class Workload:
    """Sums over unfinished sequences.

    Args:
        page_size: tokens of a page.
        shares: whether sequences that begin alike hold the same pages; those with ``Sequence.shares`` do.
    """

    def __init__(self, page_size: int, *, shares: bool = True) -> None:
        self._page_size = page_size
        self._shares = shares
        self._beginnings = SharedPrefixCounter(page_size)
        self._count = 0
        self._num_own_pages = 0
        self._num_prompt = 0
        self._num_new = 0

    @property
    def num_pages(self) -> int:
        """Enough for all of them at once."""
        return self._num_own_pages - self._beginnings.num_repeated

    def add(self, sequence: Sequence, num_pages: int) -> None:
        """Count a sequence that needs so many pages when it runs alone."""
        self._change(sequence, num_pages, 1)
        if self._shares and sequence.shares:
            self._beginnings.add(sequence.number, sequence.prompt_ids)

    def remove(self, sequence: Sequence, num_pages: int) -> None:
        """Count it no more."""
        self._change(sequence, -num_pages, -1)
        self._beginnings.remove(sequence.number)

    def keep_apart(self, sequence: Sequence) -> None:
        """Count the pages of a sequence by themselves, because nobody who begins alike will find them."""
        self._beginnings.remove(sequence.number)

    def pace(self, num_pages: int, max_sequences: int) -> int:
        """Tokens of a pass over texts of all ages, as many as fit ``num_pages``; all that there are where all fit at
        once; see [Note: pace]."""
        num_prompt = self._num_prompt - self._beginnings.num_repeated * self._page_size
        if self.num_pages <= num_pages and self._count <= max_sequences:
            return num_prompt + self._num_new
        num_together = min(num_pages * self._count / self.num_pages, max_sequences)
        return max(int(num_together * (num_prompt / self._num_new + 1)), _LEAST_PACE)

    def _change(self, sequence: Sequence, num_pages: int, count: int) -> None:
        self._num_own_pages += num_pages
        self._count += count
        self._num_prompt += count * len(sequence.prompt_ids)
        self._num_new += count * sequence.max_new_tokens
