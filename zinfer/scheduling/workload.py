"""Sums the needs of unfinished sequences, and computes how many tokens a pass should have.

[Note: pace] If prompts filled all pages at once, all sequences would end at the same time too, and the passes between
would have decodes only, which take far less time than streaming the weights. So a pass has only as many tokens as keep
all pages in use: as many new prompts as sequences end in a pass, with the running sequences evenly spread in age. If
all waiting sequences fit at once, no others follow, and starting them at once takes the fewest passes.
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

from zinfer.scheduling.sequence import Sequence

_HASH_BYTES: Final = 8
_LEAST_PACE: Final = 8192
"""Tokens that a pass may always have: about what a GPU computes while 16-bit weights cross its link."""


class SharedPrefixCounter:
    """Counts the full pages that prompts share as prefixes, which are needed only once.

    Pages are compared by hash, so a collision may count two different pages as one; the counts are for planning only.
    The hash is the same in every process, so that ranks that share passes plan the same ones.

    Attributes:
        num_repeated: pages that the prompts save by sharing: all their full pages minus the distinct ones.
    """

    def __init__(self, page_size: int) -> None:
        self.num_repeated = 0
        self._page_size = page_size
        self._counts: dict[bytes, int] = {}
        self._pages: dict[int, tuple[bytes, ...]] = {}

    def add(self, number: int, prompt_ids: "array[int]") -> None:
        """Count the prompt of a new sequence number."""
        assert number not in self._pages, f"{number} was added before"
        pages = self._pages[number] = tuple(self._hashes(prompt_ids))
        counts = self._counts
        for page in pages:
            count = counts.get(page, 0)
            counts[page] = count + 1
            self.num_repeated += count > 0

    def remove(self, number: int) -> None:
        """Stop counting the prompt of a sequence number, if it has one."""
        counts = self._counts
        for page in self._pages.pop(number, ()):
            count = counts.pop(page) - 1
            if count:
                counts[page] = count
                self.num_repeated -= 1

    def _hashes(self, prompt_ids: "array[int]") -> Iterator[bytes]:
        """Yield the hash of each page and its prefix, without the last token, which is always computed."""
        page = b""
        for begin in range(0, len(prompt_ids) - self._page_size, self._page_size):
            tokens = prompt_ids[begin : begin + self._page_size].tobytes()
            page = blake2b(page + tokens, digest_size=_HASH_BYTES).digest()
            yield page


@dataclass
class WorkSums:
    """Sums over unfinished sequences that share no pages: how many, their pages, prompts and new tokens."""

    count: int = 0
    num_pages: int = 0
    num_prompt: int = 0
    num_new: int = 0

    def change(self, count: int, num_pages: int, num_prompt: int, num_new: int) -> None:
        """Add to each sum."""
        self.count += count
        self.num_pages += num_pages
        self.num_prompt += num_prompt
        self.num_new += num_new

    def pace(self, num_pages: int, max_sequences: int) -> int:
        """Return the tokens that a pass should have, for as many sequences as fit ``num_pages``; all if all fit.

        See [Note: pace].
        """
        num_together = self.num_together(num_pages, max_sequences)
        if num_together == self.count:
            return self.num_prompt + self.num_new
        return max(int(num_together * (self.num_prompt / self.num_new + 1)), _LEAST_PACE)

    def num_together(self, num_pages: int, max_sequences: int) -> float:
        """Return how many of the sequences fit ``num_pages`` together, on average."""
        if self.num_pages <= num_pages and self.count <= max_sequences:
            return self.count
        return min(num_pages * self.count / self.num_pages, max_sequences)


class Workload:
    """Sums over unfinished sequences, with the pages that they share.

    Args:
        page_size: tokens of a page.
        shares: whether sequences with a common prefix share pages; only those with ``Sequence.shares`` and
            without tokens to score do.
    """

    def __init__(self, page_size: int, *, shares: bool = True) -> None:
        self._page_size = page_size
        self._shares = shares
        self._prefixes = SharedPrefixCounter(page_size)
        self._own = WorkSums()

    @property
    def num_pages(self) -> int:
        """Number of pages for all of them at once."""
        return self._own.num_pages - self._prefixes.num_repeated

    def add(self, sequence: Sequence, num_pages: int) -> None:
        """Count a sequence that needs ``num_pages`` when it runs alone."""
        self._change(sequence, num_pages, 1)
        if self._shares and sequence.shares and not sequence.num_to_score:
            self._prefixes.add(sequence.number, sequence.prompt_ids)

    def remove(self, sequence: Sequence, num_pages: int) -> None:
        """Stop counting a sequence; arguments as for `add`."""
        self._change(sequence, -num_pages, -1)
        self._prefixes.remove(sequence.number)

    def stop_sharing(self, sequence: Sequence) -> None:
        """Count the pages of a sequence as unshared, because its prefix is no longer found."""
        self._prefixes.remove(sequence.number)

    def pace(self, num_pages: int, max_sequences: int) -> int:
        """Return the tokens that a pass should have, for as many sequences as fit ``num_pages``; all if all fit.

        See [Note: pace].
        """
        return self._sums.pace(num_pages, max_sequences)

    def num_together(self, num_pages: int, max_sequences: int) -> float:
        """Return how many of the sequences fit ``num_pages`` together, on average."""
        return self._sums.num_together(num_pages, max_sequences)

    @property
    def _sums(self) -> WorkSums:
        """The sums without what is shared."""
        own, num_repeated = self._own, self._prefixes.num_repeated
        num_prompt = own.num_prompt - num_repeated * self._page_size
        return WorkSums(own.count, own.num_pages - num_repeated, num_prompt, own.num_new)

    def _change(self, sequence: Sequence, num_pages: int, count: int) -> None:
        self._own.change(count, num_pages, count * len(sequence.prompt_ids), count * sequence.max_new_tokens)
