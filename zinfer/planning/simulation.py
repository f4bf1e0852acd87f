"""Simulate the passes of a job with the real scheduler, over sequences without tokens.

Shared prefixes and sequences that end early make a job shorter; neither is simulated.

[Note: passes in step]
Ranks that share the bytes of weights make each pass together, each over rows of its own, and it takes as long as that
of the rank with the most work. Where rows differ, and a few passes of many tokens follow many of few, the ranks' large
passes come at different times, so that nearly every pass is a large one for somebody. So the passes of two ranks are
simulated, each with rows of its own; others make the same passes as one of them at other times.
"""

import math
from collections import deque
from collections.abc import Container, Sequence
from dataclasses import replace
from itertools import compress, zip_longest
from statistics import fmean
from typing import Final, NamedTuple

from zinfer.errors import PlanError
from zinfer.planning.kv_budget import BatchingBudget
from zinfer.scheduling.pass_order import USUAL, PassOrder
from zinfer.scheduling.schedule import Pass, PassSize
from zinfer.scheduling.sequence import Sequence as TokenSequence

_IDLE: Final = PassSize(0, 0, 0)
_MOST_RANKS: Final = 8
_LATER: Final = 3  # passes


def simulate(
    prompt_lens: Sequence[int],
    new_tokens: Sequence[int],
    budget: BatchingBudget,
    window: int | None = None,
    order: PassOrder = USUAL,
    most_passes: float = math.inf,
    wanted: Container[int] | None = None,
) -> list[PassSize]:
    """Schedule the passes of a job.

    Args:
        prompt_lens: tokens of each prompt.
        new_tokens: tokens generated after each.
        budget: budget of pages and tokens.
        window: as for `Scheduler`.
        order: of every pass.
        most_passes: more are not of interest; one more is returned then.
        wanted: numbers of prompts; passes without any of them are left out. None: there are no such passes.

    Raises:
        PlanError: a sequence does not fit the cache even alone.
    """
    # Prompts share no prefix, and hashing pages takes most of the time, so try without prefix sharing. But a preempted
    # sequence may find its own pages when it resumes: then simulate again with sharing.
    job = prompt_lens, new_tokens, budget, window, order, most_passes, wanted
    return _passes(*job, shares=False) or _passes(*job, shares=True)


def _passes(
    prompt_lens: Sequence[int],
    new_tokens: Sequence[int],
    budget: BatchingBudget,
    window: int | None,
    order: PassOrder,
    most_passes: float,
    wanted: Container[int] | None,
    *,
    shares: bool,
) -> list[PassSize]:
    """Return the passes; empty if a sequence is preempted while ``shares`` is False."""
    scheduler = budget.scheduler(window)
    for number, (prompt_len, count) in enumerate(zip(prompt_lens, new_tokens, strict=True)):
        scheduler.add(TokenSequence(number, (number, *[0] * (prompt_len - 1)), count, shares=shares))
    sizes: list[PassSize] = []
    under_way: deque[Pass] = deque()
    while (coming := scheduler.schedule(order)) is not None or under_way:
        if scheduler.has_preempted and not shares:
            return []
        if len(sizes) > most_passes:
            break
        if coming is not None:
            if wanted is None or any(sequence.number in wanted for sequence in coming.chunks.sequences):
                sizes.append(coming.size)
            scheduler.advance(coming)
        if budget.num_sets > 1:  # else no sequence waits for its token
            under_way += [] if coming is None else [coming]
            if coming is None or len(under_way) == budget.num_sets:
                chunks = under_way.popleft().chunks
                scheduler.receive((each, 0) for each in compress(chunks.sequences, chunks.samples))
    return sizes


def simulated_ranks(num_ranks: int, rows: Sequence[tuple[int, int]]) -> int:
    """Return how many of the ranks in step are simulated: one if all rows are alike, since their passes are, too."""
    return min(num_ranks, 2) if len(set(rows)) > 1 else 1


def in_step(passes: Sequence[list[PassSize]], num_ranks: int, scale: float = 1.0) -> list[PassSize]:
    """Return the passes that ranks make together, each as large as the largest of theirs, times ``scale``.

    Ranks that were not simulated make the passes of one that was, some passes later. What a sample's pass has more than
    others' stands for that of several rows, which differ, too: it grows by the root.

    Args:
        passes: of some of the ranks.
    """
    if len(passes) == scale == 1:
        return passes[0]
    if len(passes) == 1:
        return [PassSize(*(round(scale * number) for number in size)) for size in passes[0]]
    ranks = []
    for rank in range(min(num_ranks, _MOST_RANKS)):
        own = passes[rank % len(passes)]
        first = -(rank // len(passes)) * _LATER % len(own)
        ranks.append(own[first:] + own[:first])

    def larger(numbers: tuple[int, ...]) -> int:
        mean = fmean(numbers)
        return round(scale * mean + math.sqrt(scale) * (max(numbers) - mean))

    return [PassSize(*map(larger, zip(*sizes, strict=True))) for sizes in zip_longest(*ranks, fillvalue=_IDLE)]


class RankPasses(NamedTuple):
    """Simulated passes: those of one rank, and those that all ranks make together, which are the same of one alone."""

    own: list[PassSize]
    together: list[PassSize]

    @classmethod
    def of(cls, ranks: Sequence[list[PassSize]], num_ranks: int, scale: float) -> "RankPasses":
        """Return the passes of a sample, so many times as large."""
        return cls(in_step(ranks[:1], 1, scale), in_step(ranks, num_ranks, scale))


class Simulations:
    """Simulates one job under several budgets, and reuses results.

    A sample of every n-th row is simulated in an n-th of the cache, the sequences and the tokens of a pass, and its
    passes are n times as large: they are those of all rows. Where an n-th of the cache holds no row, or an n-th of
    the sequences is no whole number of them, a larger part is taken, and its passes are repeated. If no pass reaches
    its token limit, a larger limit gives the same passes.

    Args:
        prompt_lens, new_tokens, window: as for `simulate`; ``window`` is also an attribute.
        scale: rows for each row of the sample, 1 or more.
        other: ``prompt_lens`` and ``new_tokens`` of another rank in step; see [Note: passes in step].
        num_ranks: that are in step.

    ``num_passes``: passes simulated so far.
    """

    def __init__(
        self,
        prompt_lens: Sequence[int],
        new_tokens: Sequence[int],
        window: int | None,
        scale: float = 1.0,
        other: tuple[Sequence[int], Sequence[int]] | None = None,
        num_ranks: int = 1,
    ) -> None:
        self._rows = [(prompt_lens, new_tokens), *([other] if other is not None else [])]
        self._scale, self._num_ranks = scale, num_ranks
        self._longest = max(sum(row) for lengths in self._rows for row in zip(*lengths, strict=True))
        self.window, self.num_passes = window, 0
        # Passes of each rank with their token limit, by everything else that affects passes.
        self._found: dict[tuple[object, ...], list[tuple[int, list[list[PassSize]]]]] = {}

    def under(self, budget: BatchingBudget, order: PassOrder = USUAL, most_passes: float = math.inf) -> RankPasses:
        """Return the passes under a budget, all by one order; raises like `simulate`, and for too many passes."""
        scale = self._scale_under(budget)
        budget = self._part_of(budget, scale)
        if order.most_tokens is not None:
            order = PassOrder(max(round(order.most_tokens / scale), 1))
        pages = (budget.num_pages, budget.page_size, budget.most_swapped_pages)
        found = self._found.setdefault((*pages, budget.max_sequences, budget.order, budget.lends, order), [])
        limit = budget.tokens_per_pass
        for other, ranks in found:
            if limit == other or max(size.num_tokens for passes in ranks for size in passes) < other < limit:
                return RankPasses.of(ranks, self._num_ranks, scale)
        ranks = []
        for prompt_lens, new_tokens in self._rows:
            ranks.append(simulate(prompt_lens, new_tokens, budget, self.window, order, most_passes))
            self.num_passes += len(ranks[-1])
            if len(ranks[-1]) > most_passes:
                raise PlanError(f"more than {most_passes:,.0f} passes")
        found.append((limit, ranks))
        return RankPasses.of(ranks, self._num_ranks, scale)

    def repeats(self, budget: BatchingBudget) -> float:
        """Return how often the passes under a budget are repeated for all rows."""
        return self._scale / self._scale_under(budget)

    def _scale_under(self, budget: BatchingBudget) -> float:
        """Return what part of a budget the sample runs in: its cache holds the longest row, its sequences are whole."""
        most = max(min(self._scale, budget.num_pages / self._pages_alone(budget), budget.tokens_per_pass), 1.0)
        return max(budget.max_sequences / math.ceil(budget.max_sequences / most), 1.0)

    def _pages_alone(self, budget: BatchingBudget) -> int:
        return min(-(-self._longest // budget.page_size) + 1, budget.num_pages)

    def _part_of(self, budget: BatchingBudget, scale: float) -> BatchingBudget:
        """Return the part of a budget for the sample; a sequence that fits alone still does."""
        if scale == 1:
            return budget
        return replace(
            budget,
            num_pages=max(int(budget.num_pages / scale), self._pages_alone(budget)),
            max_sequences=round(budget.max_sequences / scale),
            tokens_per_pass=round(budget.tokens_per_pass / scale),
        )
