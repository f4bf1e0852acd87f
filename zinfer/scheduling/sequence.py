"""A prompt on its way to a completion: its tokens, how many of them are computed, and the pages that hold those.

Bookkeeping only: nothing here takes a page or decides what is computed next; the scheduler does.
"""

from array import array
from collections import abc
from dataclasses import InitVar, dataclass, field
from enum import Enum, auto
from typing import Final

PENDING: Final = -1
"""Stands in ``Sequence.output_ids`` for the last token where its pass is under way and it is not known yet."""


class SequenceState(Enum):
    """Where a sequence stands, by what it costs in memory."""

    WAITING = auto()
    """Holds no pages: not begun, or to be computed again from its first token."""
    RUNNING = auto()
    """Holds pages on the device for all that is computed."""
    SWAPPED = auto()
    """Holds no pages; the contents of those it had are kept off the device."""
    FINISHED = auto()
    """Holds nothing: completed or aborted."""


@dataclass(eq=False, slots=True)
class Sequence:
    """One prompt and what has been generated after it.

    Args:
        prompt: its tokens, one at least, each below 2**31.

    Attributes:
        number: place in the order of arrival, unique in a scheduler.
        prompt_ids: the prompt's tokens; 4 bytes each, and parts of it are copied as they lie there.
        max_new_tokens: most tokens to generate, one at least.
        output_ids: the tokens generated so far, the last one perhaps ``PENDING``.
        num_computed: tokens, from the first on, whose keys and values lie in pages (SWAPPED: off the device).
        pages: numbers of the pages in token order; ``HOLE`` for those that a sliding window has left behind.
        num_dropped: holes at the beginning of ``pages``.
        prefix: the pool's name for all tokens up to the end of the last page that has a name.
        num_named: pages, from the first on, that ``prefix`` stands for.
        shares: whether its pages are found by others, and those of others by it.
        state: where it stands.

    Raises:
        ValueError: an empty prompt, or no token to generate; names the sequence.
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
    state: SequenceState = SequenceState.WAITING

    def __post_init__(self, prompt: abc.Sequence[int]) -> None:
        self.prompt_ids = array("i", prompt)
        if not self.prompt_ids:
            raise ValueError(f"sequence {self.number}: the prompt has no tokens; give it one at least")
        if self.max_new_tokens < 1:
            raise ValueError(f"sequence {self.number}: max_new_tokens is {self.max_new_tokens}; it must be 1 or more")

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of what is generated so far."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def num_known(self) -> int:
        """Tokens, from the first on, that are known."""
        output_ids = self.output_ids
        return len(self.prompt_ids) + len(output_ids) - (1 if output_ids and output_ids[-1] == PENDING else 0)

    def tokens(self, begin: int, end: int) -> "array[int]":
        """The tokens at positions ``begin`` to ``end`` (exclusive) of prompt and output."""
        num_prompt = len(self.prompt_ids)
        if end <= num_prompt:
            return self.prompt_ids[begin:end]
        return self.prompt_ids[begin:] + array("i", self.output_ids[max(begin - num_prompt, 0) : end - num_prompt])
