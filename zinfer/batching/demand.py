"""What the sequences that are not finished need together, and how fast they had best be begun.

[Note: pace] Where prompts filled all pages at once, texts would all end at once too, and passes between would carry
decodes alone: those are over long before streamed weights are there. So passes carry no more than what keeps all pages
in use for ever: as many prompts as texts end in a pass, when those that fit the pool are of all ages.
"""

from typing import Final

from zinfer.batching.sequence import Sequence

_LEAST_PACE: Final = 8192
"""Tokens that a pass may always carry: about what a GPU computes while 16-bit weights cross its link."""


class Demand:
    """Sums over unfinished sequences.

    ``num_pages`` is enough for all of them at once.
    """

    def __init__(self) -> None:
        self.num_pages = 0
        self._count = 0
        self._num_prompt = 0
        self._num_new = 0

    def add(self, sequence: Sequence, num_pages: int) -> None:
        """Count a sequence that needs so many pages."""
        self._change(sequence, num_pages, 1)

    def remove(self, sequence: Sequence, num_pages: int) -> None:
        """Count it no more."""
        self._change(sequence, -num_pages, -1)

    def pace(self, num_pages: int, max_sequences: int) -> int:
        """Tokens of a pass over texts of all ages, as many as fit ``num_pages``; see [Note: pace]."""
        if not self._count:
            return _LEAST_PACE
        num_together = min(num_pages * self._count / self.num_pages, max_sequences)
        return max(int(num_together * (self._num_prompt / self._num_new + 1)), _LEAST_PACE)

    def _change(self, sequence: Sequence, num_pages: int, count: int) -> None:
        self.num_pages += num_pages
        self._count += count
        self._num_prompt += count * len(sequence.prompt_ids)
        self._num_new += count * sequence.max_new_tokens
