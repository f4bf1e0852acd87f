"""`LatencyTarget`: the time between two tokens of a sequence, as a limit on the tokens of passes.

This is Dynamic SplitFuse with a budget that follows from seconds: every running sequence gets its token in each pass,
so the time between its tokens is that of a pass; prompts are computed in chunks beside, as far as the time allows.
"""

import math
from collections.abc import Callable, Sequence
from typing import Final

from zinfer.scheduling.pass_order import PassOrder
from zinfer.scheduling.pass_seconds import FREE_SLACK, PassSeconds

_FORGETTING: Final = 1.01  # times the shortest launch, by each that is longer


class LatencyTarget:
    """Limits passes by the seconds that they take.

    Args:
        seconds: most between two tokens of a sequence.
        planned, sizes: as for `PassSeconds`.
        most_tokens: of any pass.
        num_sets: passes under way at once: a sequence is in one of so many.

    Attributes:
        reachable_s: time between two tokens that can be reached: ``seconds``, or that of the shortest pass.
    """

    def __init__(
        self,
        seconds: float,
        planned: Callable[[int], float],
        most_tokens: int,
        num_sets: int = 1,
        sizes: Sequence[int] = (),
    ) -> None:
        self._pass_s, self._most_tokens = seconds / num_sets, most_tokens
        self._seconds = PassSeconds(planned, sizes)
        self._launch_s = math.inf
        self.reachable_s = max(seconds, FREE_SLACK * planned(1) * num_sets)

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Take the seconds from the end of the pass before to the end of this one."""
        self._seconds.observe(num_tokens, seconds)

    def observe_launch(self, seconds: float) -> None:
        """Take the seconds in which Python launched the kernels of a pass that is not replayed.

        Some are longer, because the device's queue was full.
        """
        self._launch_s = min(seconds, _FORGETTING * self._launch_s)

    def order(self) -> PassOrder:
        """Return the order of the next pass.

        If Python takes longer to launch a pass with prompts than is asked for, it is one that is padded and replayed.
        Where none is, it has as many tokens as are computed meanwhile, or prompts would never end.
        """
        found = self._seconds.most_tokens(self._pass_s, self._most_tokens)
        if self._pass_s >= self._launch_s or self._launch_s == math.inf:
            return PassOrder(found)
        if self._seconds.largest_padded:
            return PassOrder(min(found, self._seconds.largest_padded))
        return PassOrder(max(found, self._seconds.most_planned(self._launch_s, self._most_tokens)))
