"""`PassOrder`: what is decided about a pass beside what follows from its sequences."""

from collections.abc import Mapping
from typing import NamedTuple


class PassOrder(NamedTuple):
    """Decided by one rank for all that make the same passes, since it may follow from clocks.

    most_tokens: of the pass; None: as many as the scheduler may give any. Running sequences get their token anyway, but
        those in the background only what others leave.
    guesses: tokens to verify, by their sequences' numbers; the tokens of earlier passes are taken before. None: the
        pass verifies none, and need not wait for them.
    """

    most_tokens: int | None = None
    guesses: Mapping[int, tuple[int, ...]] | None = None

    def most_running(self, max_sequences: int) -> int:
        """Return how many sequences may run: a quarter of a pass is left to prompts, or they would wait for an end."""
        return max_sequences if self.most_tokens is None else min(max_sequences, max(self.most_tokens * 3 // 4, 1))


USUAL = PassOrder()
"""The order of a pass about which nothing is decided."""
