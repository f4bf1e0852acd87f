"""Passes of one job that were rehearsed under several budgets: what two of them have in common is rehearsed once."""

from collections.abc import Sequence

from zinfer.planning.kv_budget import BatchingBudget
from zinfer.planning.simulation import simulate
from zinfer.scheduling.schedule import PassSize

_Sizes = tuple[int, int, int, int, str, bool]


class Rehearsals:
    """Remembers the passes of one job by what decides them.

    Passes none of which is as large as it may be are the same under any larger limit: something else ended them.

    Args:
        prompt_lens, new_tokens, window: as for `simulate`; ``window`` stays to be read.
    """

    def __init__(self, prompt_lens: Sequence[int], new_tokens: Sequence[int], window: int | None) -> None:
        self._prompt_lens = prompt_lens
        self._new_tokens = new_tokens
        self.window = window
        self._found: dict[_Sizes, list[tuple[int, list[PassSize]]]] = {}  # with the limit of tokens a pass

    def under(self, budget: BatchingBudget) -> list[PassSize]:
        """The passes under a budget; raises as `simulate` does."""
        limit, found = budget.tokens_per_pass, self._found.setdefault(_sizes(budget), [])
        for other, passes in found:
            if limit == other or max(size.num_tokens for size in passes) < other < limit:
                return passes
        passes = simulate(self._prompt_lens, self._new_tokens, budget, self.window)
        found.append((limit, passes))
        return passes


def _sizes(budget: BatchingBudget) -> _Sizes:
    """All that decides passes but the tokens that one may carry."""
    return (
        budget.max_sequences,
        budget.num_pages,
        budget.page_size,
        budget.most_swapped_pages,
        budget.order,
        budget.lends,
    )
