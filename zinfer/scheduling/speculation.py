"""`Speculation`: which passes verify guesses, and how many.

[Note: guesses]
While a pass streams its weights it may have tokens that cost no time. If only a few sequences run, these tokens are
guesses of what follows each sequence's last token. A pass computes logits behind the last token and each guess, and
draws a token of each: the first is the sequence's next one in any case, and each further one is if the guess before it
is equal to the token drawn there. Draws depend on a row's seed and the number of its tokens alone, so the text is the
same as without guesses, for sampled outputs too. Keys and values of wrong guesses are overwritten.

Guesses need a sequence's last token, so a pass with guesses begins after the host has seen the tokens of the one
before.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal, Protocol, TypeAlias

from zinfer.scheduling.sequence import Sequence as TokenSequence

MOST_TOKENS: Final = 256
"""Of a pass with guesses. A fixed number, so that equal jobs make equal passes."""
_MOST_GUESSES: Final = 31  # for one sequence
Kind: TypeAlias = Literal["ngram", "off"]


def choose_kind(streams: bool, free_tokens: Callable[[], int]) -> Kind:
    """Return whether to look guesses up: where weights stream to a GPU and leave the time for `MOST_TOKENS`.

    Args:
        streams: whether weights stream to a GPU.
        free_tokens: of a pass; called only if they stream, since it may measure rates.
    """
    return "ngram" if streams and free_tokens() >= MOST_TOKENS else "off"


class Drafter(Protocol):
    """Guesses tokens."""

    def guess(self, sequences: Sequence[TokenSequence], most: int) -> Mapping[int, tuple[int, ...]]:
        """As `NGramDrafter.guess`."""


class Speculation:
    """Makes guesses for passes of few sequences.

    Attributes:
        num_guessed: tokens guessed and verified so far.
        num_accepted: those of them that were right.
    """

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.num_guessed = self.num_accepted = 0

    def most_guesses(self, num_running: int) -> int:
        """Return how many tokens may be guessed for each of so many sequences."""
        return min(MOST_TOKENS // max(num_running, 1) - 1, _MOST_GUESSES)

    def guess(self, sequences: Sequence[TokenSequence], most: int) -> Mapping[int, tuple[int, ...]]:
        """Return up to ``most`` guesses for each sequence that has any, by its number."""
        return self._drafter.guess(sequences, most)
