"""What the sequences that are not finished need together, and how fast they had best be begun.

[Note: pace] Where prompts filled all pages at once, sequences would all end at once too, and passes between would carry
decodes alone: those are over long before streamed weights are there. So passes carry no more than what keeps all pages
in use for ever: as many prompts as sequences end in a pass, when those that fit the pool are of all ages. Where all
that wait fit at once, nothing comes after them, and the sooner they begin the fewer passes there are.
"""

from array import array
from collections.abc import Iterator
from typing import Final

from zinfer.scheduling.sequence import Sequence

_LEAST_PACE: Final = 8192
"""Tokens that a pass may always carry: about what a GPU computes while 16-bit weights cross its link."""


class SharedPrefixCounter:
    """Counts prompts by the whole pages that they begin with: those are needed once, however many of them run.

    Pages are told apart by hashes, tokens are not kept: two pages of different tokens might be taken for one, and what
    is counted is for planning only.

    Attributes:
        num_repeated: pages of prompts that were added and not removed, less one of each that are equal.
    """

    def __init__(self, page_size: int) -> None:
        self.num_repeated = 0
        self._page_size = page_size
        self._counts: dict[int, int] = {}
        self._pages: dict[int, tuple[int, ...]] = {}

    def add(self, number: int, prompt_ids: "array[int]") -> None:
        """Count the prompt of a number that has none."""
        assert number not in self._pages, f"{number} was added before"
        pages = self._pages[number] = tuple(self._hashes(prompt_ids))
        counts = self._counts
        for page in pages:
            count = counts.get(page, 0)
            counts[page] = count + 1
            self.num_repeated += count > 0

    def remove(self, number: int) -> None:
        """Count a number's prompt no more, if it has one."""
        counts = self._counts
        for page in self._pages.pop(number, ()):
            count = counts.pop(page) - 1
            if count:
                counts[page] = count
                self.num_repeated -= 1

    def _hashes(self, prompt_ids: "array[int]") -> Iterator[int]:
        """Of each page and all before it; the last token is computed anew whatever is found."""
        page = 0
        for begin in range(0, len(prompt_ids) - self._page_size, self._page_size):
            page = hash((page, prompt_ids[begin : begin + self._page_size].tobytes()))
            yield page


class Workload:
    """Sums over unfinished sequences.

    Args:
        page_size: tokens of a page.
        shares: whether sequences that begin alike hold the same pages; those with ``Sequence.shares`` do.
    """

    def __init__(self, page_size: int, *, shares: bool = True) -> None:
        self._page_size = page_size
        self._shares = shares
        self._prefixes = SharedPrefixCounter(page_size)
        self._count = 0
        self._num_own_pages = 0
        self._num_prompt = 0
        self._num_new = 0

    @property
    def num_pages(self) -> int:
        """Enough for all of them at once."""
        return self._num_own_pages - self._prefixes.num_repeated

    def add(self, sequence: Sequence, num_pages: int) -> None:
        """Count a sequence that needs so many pages when it runs alone."""
        self._change(sequence, num_pages, 1)
        if self._shares and sequence.shares:
            self._prefixes.add(sequence.number, sequence.prompt_ids)

    def remove(self, sequence: Sequence, num_pages: int) -> None:
        """Count it no more."""
        self._change(sequence, -num_pages, -1)
        self._prefixes.remove(sequence.number)

    def keep_apart(self, sequence: Sequence) -> None:
        """Count the pages of a sequence by themselves, because nobody who begins alike will find them."""
        self._prefixes.remove(sequence.number)

    def pace(self, num_pages: int, max_sequences: int) -> int:
        """Tokens of a pass over sequences of all ages, as many as fit ``num_pages``; all where all fit at once.

        See [Note: pace].
        """
        num_prompt = self._num_prompt - self._prefixes.num_repeated * self._page_size
        if self.num_pages <= num_pages and self._count <= max_sequences:
            return num_prompt + self._num_new
        num_together = min(num_pages * self._count / self.num_pages, max_sequences)
        return max(int(num_together * (num_prompt / self._num_new + 1)), _LEAST_PACE)

    def _change(self, sequence: Sequence, num_pages: int, count: int) -> None:
        self._num_own_pages += num_pages
        self._count += count
        self._num_prompt += count * len(sequence.prompt_ids)
        self._num_new += count * sequence.max_new_tokens
