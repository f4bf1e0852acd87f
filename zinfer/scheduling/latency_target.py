"""`LatencyTarget`: the time between two tokens of a sequence, as a limit on the tokens of passes.

This is Dynamic SplitFuse with a budget that follows from seconds: every running sequence gets its token in each pass,
so the time between its tokens is that of a pass; prompts are computed in chunks beside, as far as the time allows.
"""

from collections.abc import Callable, Sequence

from zinfer.scheduling.pass_order import PassOrder
from zinfer.scheduling.pass_seconds import FREE_SLACK, PassSeconds


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
        self.reachable_s = max(seconds, FREE_SLACK * planned(1) * num_sets)

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Take the seconds from the end of the pass before to the end of this one."""
        self._seconds.observe(num_tokens, seconds)

    def order(self) -> PassOrder:
        """Return the order of the next pass."""
        return PassOrder(self._seconds.most_tokens(self._pass_s, self._most_tokens))
