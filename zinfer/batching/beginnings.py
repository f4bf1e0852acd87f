"""Whole pages of tokens that several prompts begin with: they are needed once, whoever of them runs."""

from collections import Counter
from collections.abc import Iterator


class Beginnings:
    """Counts prompts by the pages that they begin with.

    Pages are told apart by hashes, tokens are not kept: two pages of different tokens might be taken for one, and what
    is counted is for planning only.

    Attributes:
        num_repeated: pages of prompts that were added and not removed, less one of each that are equal.
    """

    def __init__(self, page_size: int) -> None:
        self.num_repeated = 0
        self._page_size = page_size
        self._counts: Counter[int] = Counter()

    def add(self, prompt_ids: tuple[int, ...]) -> None:
        """Count a prompt."""
        for page in self._pages(prompt_ids):
            self.num_repeated += self._counts[page] > 0
            self._counts[page] += 1

    def remove(self, prompt_ids: tuple[int, ...]) -> None:
        """Count it no more."""
        for page in self._pages(prompt_ids):
            assert self._counts[page] > 0, "removed more often than added"
            self._counts[page] -= 1
            if self._counts[page]:
                self.num_repeated -= 1
            else:
                del self._counts[page]

    def _pages(self, prompt_ids: tuple[int, ...]) -> Iterator[int]:
        """A hash of each page and all before it; the last token is computed anew whatever is found."""
        page = 0
        for begin in range(0, len(prompt_ids) - self._page_size, self._page_size):
            page = hash((page, prompt_ids[begin : begin + self._page_size]))
            yield page
