"""Follows sequences through the grammars of their outputs: which tokens may come next, and where an output ends.

All of it is computed on the host from a sequence's tokens alone, while the device computes the pass whose logits are
masked. Ranks that draw the same tokens compute the same masks.
"""

from collections.abc import Collection, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from zinfer.requests.grammar import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher

Words = np.ndarray[tuple[int, ...], np.dtype[np.uint32]]

_BITS: Final = 32  # of a word of a mask
_STUCK: Final = "structured_outputs: none of the model's tokens continues the output"


class StructureMatcher:
    """The place of one sequence in the grammar of its output.

    Args:
        grammar: of the output.
        end_token_ids: the model's end tokens for this sequence; allowed only where the output may end.
        last_ids: all tokens that end the sequence; allowed there too.

    Attributes:
        is_complete: whether the output is whole, and nothing can follow it.
        problem: why the sequence cannot go on; None if it can.
    """

    def __init__(self, grammar: Grammar, end_token_ids: Collection[int], last_ids: Collection[int]) -> None:
        self.grammar = grammar
        self._end_token_ids, self._last_ids = end_token_ids, last_ids
        self.is_complete = False
        self.problem: str | None = None

    @property
    def is_over(self) -> bool:
        """Whether no token can follow."""
        return self.is_complete or self.problem is not None

    # Made at their first use: thousands of sequences may wait.

    @cached_property
    def state(self) -> "LLMatcher":
        """llguidance's own state."""
        return self.grammar.start.deep_copy()

    @cached_property
    def _never(self) -> tuple[Words, Words]:
        return _bits_of({*self.grammar.never_ids, *self._end_token_ids}, self.grammar.vocab_size)

    @cached_property
    def _last(self) -> tuple[Words, Words]:
        return _bits_of({*self._end_token_ids, *self._last_ids}, self.grammar.vocab_size)

    def accept(self, token_id: int) -> None:
        """Go on behind the sequence's next token."""
        self.state.consume_token(token_id)
        self._find_problem()
        self.is_complete = self.problem is None and self.state.is_stopped()

    def fill(self, mask: Words) -> None:
        """Fill a mask [words] with the tokens that may come next; end tokens only where the output may end.

        If no token is left, the sequence is over; its mask allows any, and the token that is drawn is none of it.
        """
        self.state.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        words, bits = self._never
        np.bitwise_and.at(mask, words, ~bits)
        self._find_problem()
        if not self.is_over and not mask.any():
            self.is_complete = self.state.is_accepting()
            self.problem = None if self.is_complete else _STUCK
        if self.is_over:
            mask.fill(np.iinfo(np.uint32).max)
        elif self.state.is_accepting():
            np.bitwise_or.at(mask, *self._last)

    def _find_problem(self) -> None:
        if self.state.is_error():
            message = self.state.get_error().partition("\n")[0]
            self.problem = _STUCK if message.startswith("NoExtension") else f"structured_outputs: {message:.300}"


def token_masks(matchers: Sequence[StructureMatcher], *, is_pinned: bool = False) -> torch.Tensor:
    """Return the tokens that may come next: [matchers, words] int32 on the host, 32 tokens a word, lowest bit first.

    Afterwards a matcher may be over. All are of one vocabulary, at least one. They take turns: sequences of one grammar
    share what llguidance has worked out, so with threads it might reach a limit at another sequence on each rank.
    """
    num_words = -(-matchers[0].grammar.vocab_size // _BITS)
    masks = torch.zeros(len(matchers), num_words, dtype=torch.int32, pin_memory=is_pinned)
    for matcher, mask in zip(matchers, masks.numpy().view(np.uint32), strict=True):
        matcher.fill(mask)
    return masks


def _bits_of(token_ids: Collection[int], vocab_size: int) -> tuple[Words, Words]:
    """Return the words of a mask that these tokens are in, and their bits there; without ids beyond the vocabulary."""
    ids = np.array(sorted(each for each in token_ids if 0 <= each < vocab_size), dtype=np.uint32)
    return ids // _BITS, np.uint32(1) << ids % _BITS
