"""`PassSeconds`: how long a pass takes by its number of tokens: predicted, then corrected by what passes took."""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Final, TypeAlias

_GAIN: Final = 0.25  # of a new measurement against those before
_MOST_TIMES: Final = 4.0  # the seconds expected before: a pass that waited for something else counts no more
_FADING: Final = 0.01  # in each pass, of what another size was slower by: an outlier is not remembered for ever
FREE_SLACK: Final = 1.05
"""Tokens are free up to this multiple of the shortest pass."""

_Found: TypeAlias = dict[int, tuple[float, float]]


class PassSeconds:
    """Seconds by number of tokens.

    Corrections are kept for one size in each power of two, and interpolated between them: seconds need not be a line
    over tokens, since a pass that streams its weights takes no longer for its first thousands of tokens. Those of
    padded passes, which are replayed, say nothing about larger ones, which Python launches.

    Args:
        planned: predicts the seconds, above 0, of a pass that computes so many tokens; increases.
        sizes: that smaller passes are padded to, increasing.

    Attributes:
        largest_padded: the largest of them; 0: no pass is padded.
    """

    def __init__(self, planned: Callable[[int], float], sizes: Sequence[int] = ()) -> None:
        self._planned = lru_cache(maxsize=4096)(planned)
        self._sizes, self.largest_padded = sizes, max(sizes, default=0)
        # Of passes that are not padded, and of those that are, by exponent: tokens, and seconds by planned ones.
        self._found: tuple[_Found, _Found] = {}, {}

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Take the seconds of a pass."""
        assert num_tokens >= 1
        found, num_tokens = self._found[num_tokens <= self.largest_padded], self._padded(num_tokens)
        own, planned = round(math.log2(num_tokens)), self._planned(num_tokens)
        times = min(seconds, _MOST_TIMES * self(num_tokens)) / planned
        tokens, before = found.get(own, (float(num_tokens), times))
        found |= {place: (at, other - _FADING * max(other - times, 0)) for place, (at, other) in found.items()}
        found[own] = tokens + _GAIN * (num_tokens - tokens), before + _GAIN * (times - before)

    def __call__(self, num_tokens: int) -> float:
        """Return the seconds of a pass of so many tokens."""
        found, num_tokens = self._found[num_tokens <= self.largest_padded], self._padded(num_tokens)
        return self._planned(num_tokens) * _times(found, num_tokens)

    def most_tokens(self, within_s: float, most: int) -> int:
        """Return the tokens of the largest pass that takes no longer.

        Every pass takes as long as one of a single token, so what that one's time has room for is given at least.

        Args:
            most: the largest result.
        """
        return _most_within(self, max(within_s, FREE_SLACK * self(1)), most)

    def most_planned(self, within_s: float, most: int) -> int:
        """As `most_tokens`, whatever passes took."""
        return _most_within(self._planned, within_s, most)

    def _padded(self, num_tokens: int) -> int:
        return next((size for size in self._sizes if num_tokens <= size), num_tokens)


def _most_within(seconds: Callable[[int], float], within_s: float, most: int) -> int:
    low, high = 1, 2
    while high <= most and seconds(high) <= within_s:
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if seconds(middle) <= within_s else (low, middle)
    return low


def _times(found: _Found, num_tokens: int) -> float:
    """Return how many times the planned seconds a pass takes, between those of the next smaller and larger one."""
    below = max((each for each in found.values() if each[0] <= num_tokens), default=None)
    above = min((each for each in found.values() if each[0] > num_tokens), default=None)
    if below is None or above is None:
        return (below or above or (0, 1.0))[1]
    share = (num_tokens - below[0]) / (above[0] - below[0])
    return below[1] + share * (above[1] - below[1])
