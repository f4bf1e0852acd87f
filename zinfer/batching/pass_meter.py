"""`PassMeter`: counts passes by their seconds and tokens, for those who watch a server."""

import time
from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0)
"""Bounds of passes' seconds: weights that stream from a disk take tens of them."""
TOKENS: Final = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)


class Histogram:
    """Counts values by the least bound that is not below them.

    Attributes:
        counts: one for each bound, and one for greater values.
        total: sum of the values.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        self._bounds = bounds

    def add(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self._bounds, value)] += 1
        self.total += value


class PassMeter:
    """Measures passes; the batcher's thread notes them, others read.

    Attributes:
        seconds: from a pass's beginning, or the end of the pass before it, to its end.
        tokens: computed in each pass.
        free_tokens: tokens of a pass that take no longer than its streaming; set by whoever knows.
        num_unused: free tokens that passes did not use, so far.
        first_s: seconds of the first pass, which compiles, captures and warms; 0 before its end.
    """

    def __init__(self) -> None:
        self.seconds, self.tokens = Histogram(SECONDS), Histogram(TOKENS)
        self.free_tokens = self.num_unused = 0
        self._began_s = self.first_s = 0.0

    def begin(self) -> None:
        """Note that a pass begins, and none is under way."""
        self._began_s = time.perf_counter()

    def end(self, num_tokens: int) -> None:
        """Note that the tokens of a pass are on the host."""
        ended_s = time.perf_counter()
        self.seconds.add(ended_s - self._began_s)
        self.first_s = self.first_s or ended_s - self._began_s
        self.tokens.add(num_tokens)
        self.num_unused += max(self.free_tokens - num_tokens, 0)
        self._began_s = ended_s
