"""Whole pages of tokens that several prompts begin with: they are needed once, however many of them run."""

from array import array
from collections.abc import Iterator


class SharedPrefixCounter:
    """Counts prompts by the pages that they begin with.

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
