"""A sequence: its prompt and output tokens, how many of them are computed, and their pages.

Bookkeeping only: the scheduler takes pages and decides what is computed next.
"""

from array import array
from collections import abc
from dataclasses import InitVar, dataclass, field
from enum import Enum, auto
from typing import Final

from zinfer.scheduling.precedence import FIRST_COME, Precedence

PENDING: Final = -1
"""Marks the last token in ``Sequence.output_ids`` while its pass is under way."""


class SequenceState(Enum):
    """The state of a sequence, by its use of memory."""

    WAITING = auto()
    """Holds no pages: not started, or to be recomputed from its first token."""
    RUNNING = auto()
    """Holds pages on the device for all computed tokens."""
    SWAPPED = auto()
    """Holds no pages; their contents are kept off the device."""
    FINISHED = auto()
    """Holds nothing: completed or aborted."""


@dataclass(eq=False, slots=True)
class Sequence:
    """One prompt and the tokens generated after it.

    Args:
        prompt: its tokens, at least one, each below 2**31.

    Attributes:
        number: place in the order of arrival, unique in a scheduler.
        prompt_ids: the prompt's tokens as 4-byte integers, so that slices are plain copies.
        max_new_tokens: most tokens to generate, at least one.
        output_ids: the tokens generated so far, the last one perhaps ``PENDING``.
        num_computed: number of tokens, from the first on, whose keys and values are in pages (SWAPPED: off the device).
        pages: numbers of the pages in token order; ``HOLE`` for pages before a sliding window.
        num_dropped: holes at the beginning of ``pages``.
        prefix: the pool's name for all tokens up to the end of the last named page.
        num_named: number of pages, from the first on, that ``prefix`` covers.
        shares: whether it shares pages through the prefix cache.
        num_to_score: number of tokens, from the first on, that get logits besides those that are sampled; all but the
            last of the prompt, or 0.
        num_scored: number of these whose pass was launched.
        precedence: whether it is admitted before others.
        guesses: tokens guessed to follow, which the pass under way verifies; not counted as tokens.
        state: its state.

    Raises:
        ValueError: the prompt is empty, or no token is to be generated; names the sequence.
    """

    number: int
    prompt: InitVar[abc.Sequence[int]]
    max_new_tokens: int
    output_ids: list[int] = field(default_factory=list)
    prompt_ids: "array[int]" = field(init=False)
    num_computed: int = 0
    pages: list[int] = field(default_factory=list)
    num_dropped: int = 0
    prefix: int = 0
    num_named: int = 0
    shares: bool = True
    num_to_score: int = 0
    num_scored: int = 0
    precedence: Precedence = FIRST_COME
    guesses: tuple[int, ...] = ()
    state: SequenceState = SequenceState.WAITING

    def __post_init__(self, prompt: abc.Sequence[int]) -> None:
        self.prompt_ids = array("i", prompt)
        if not self.prompt_ids:
            raise ValueError(f"sequence {self.number}: the prompt has no tokens; give it one at least")
        if self.max_new_tokens < 1:
            raise ValueError(f"sequence {self.number}: max_new_tokens is {self.max_new_tokens}; it must be 1 or more")

    @property
    def is_background(self) -> bool:
        """Whether it gives way to sequences that are not."""
        return self.precedence.is_background

    @property
    def num_tokens(self) -> int:
        """Number of tokens of prompt and output so far."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def most_shared(self) -> int:
        """Number of tokens, from the first on, that need not be computed if pages hold their keys and values."""
        return self.num_tokens - 1 if self.num_scored >= self.num_to_score else self.num_scored

    @property
    def is_awaited(self) -> bool:
        """Whether its last token is not known yet."""
        return self.output_ids[-1:] == [PENDING]

    @property
    def num_known(self) -> int:
        """Number of tokens without the pending one."""
        output_ids = self.output_ids
        return len(self.prompt_ids) + len(output_ids) - (1 if output_ids and output_ids[-1] == PENDING else 0)

    def tokens(self, begin: int, end: int) -> "array[int]":
        """Return the tokens at positions ``begin`` to ``end`` (exclusive) of prompt, output and guesses."""
        num_prompt = len(self.prompt_ids)
        if end <= num_prompt:
            return self.prompt_ids[begin:end]
        following = self.output_ids[max(begin - num_prompt, 0) : end - num_prompt]
        if self.guesses and end > self.num_tokens:
            following += self.guesses[: end - self.num_tokens]
        return self.prompt_ids[begin:] + array("i", following)
