"""Simulate the passes of a job with the real scheduler, over sequences without tokens.

Shared prefixes and sequences that end early make a job shorter; neither is simulated.

[Note: counted passes]
While no sequence is preempted, a pass follows from sums alone: how many sequences decode, how many of them need a page,
and which end. So most simulations keep sums in place of sequences, a tenth of the work, and give what the scheduler
does to the last number; `tests/test_simulation.py` compares the two. Passes of the same sequences, until one of them
ends or a prompt is complete, are counted as one run. Once pages run short, the
scheduler itself runs. A search for sizes has no time for that, and counts preemption too: the sequence admitted last
gives up its pages, returns first, and finds those that nothing was written to since. What differs, the order in which
pages are written, moves few tokens (a test compares them).

[Note: passes in step]
Ranks that share the bytes of weights make each pass together, each over rows of its own, and it takes as long as that
of the rank with the most work. Where rows differ, and a few passes of many tokens follow many of few, the ranks' large
passes come at different times, so that nearly every pass is a large one for somebody. So the passes of two ranks are
simulated, each with rows of its own; others make the same passes as one of them at other times.
"""

import math
from collections import deque
from collections.abc import Container, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import compress, zip_longest
from statistics import fmean
from typing import Final, NamedTuple

from zinfer.errors import PlanError
from zinfer.planning.kv_budget import BatchingBudget
from zinfer.scheduling.page_allocator import check_pages, most_reserved, pages_alone
from zinfer.scheduling.pass_order import USUAL, PassOrder
from zinfer.scheduling.schedule import Pass, PassSize
from zinfer.scheduling.sequence import Sequence as TokenSequence
from zinfer.scheduling.workload import WorkSums

_IDLE: Final = PassSize(0, 0, 0)
_MOST_RANKS: Final = 8
_LATER: Final = 3  # passes


class PassRun(NamedTuple):
    """Passes of the same sequences with as many tokens each, by which the attended tokens grow. Others are alone.

    first: size of the first.
    num_passes: how many they are.
    num_more_pairs: by which the pairs of a prompt under way grow from one to the next.
    """

    first: PassSize
    num_passes: int = 1
    num_more_pairs: int = 0

    def at(self, place: int) -> PassSize:
        """Return the size of one of them."""
        tokens, samples, context, lent, pairs = self.first
        return PassSize(tokens, samples, context + place * tokens, lent, pairs + place * self.num_more_pairs)

    def times(self, scale: float) -> "PassRun":
        """Return as many passes of so many times the size."""
        return PassRun(_times(self.first, scale), self.num_passes, round(scale * self.num_more_pairs))


def _times(size: PassSize, scale: float) -> PassSize:
    return PassSize(*(round(scale * number) for number in size))


def passes_of(runs: Iterable[PassRun]) -> list[PassSize]:
    """Return the passes of runs one by one."""
    return [run.at(place) for run in runs for place in range(run.num_passes)]


def simulate(
    prompt_lens: Sequence[int],
    new_tokens: Sequence[int],
    budget: BatchingBudget,
    window: int | None = None,
    order: PassOrder = USUAL,
    most_passes: float = math.inf,
    wanted: Container[int] | None = None,
) -> list[PassSize]:
    """Return the passes of a job one by one; as `simulate_runs`, exactly."""
    return passes_of(simulate_runs(prompt_lens, new_tokens, budget, window, order, most_passes, wanted))


def simulate_runs(
    prompt_lens: Sequence[int],
    new_tokens: Sequence[int],
    budget: BatchingBudget,
    window: int | None = None,
    order: PassOrder = USUAL,
    most_passes: float = math.inf,
    wanted: Container[int] | None = None,
    *,
    is_exact: bool = True,
) -> list[PassRun]:
    """Schedule the passes of a job.

    Args:
        prompt_lens: tokens of each prompt.
        new_tokens: tokens generated after each.
        budget: budget of pages and tokens.
        window: as for `Scheduler`.
        order: of every pass.
        most_passes: more are not of interest; one more is returned then.
        wanted: numbers of prompts; passes without any of them are left out. None: there are no such passes.
        is_exact: the scheduler itself runs once pages run short; else preemption is counted too, which is about right.

    Raises:
        PlanError: a sequence does not fit the cache even alone.
    """
    # Prompts share no prefix, and hashing pages takes most of the time, so try without prefix sharing. But a preempted
    # sequence may find its own pages when it resumes: then simulate again with sharing.
    job = prompt_lens, new_tokens, budget, window, order, most_passes, wanted
    if window is None and wanted is None and budget.num_sets == 1:
        rows = _Rows.of(tuple(prompt_lens), tuple(new_tokens), budget.page_size)
        if max(rows.num_pages) > budget.num_pages:
            for row in zip(prompt_lens, new_tokens, strict=True):
                check_pages(*row, budget.num_pages, budget.page_size, None)
        counted = _CountedPasses(rows, budget, order, preempts=not is_exact).up_to(most_passes)
        return [*map(PassRun, _passes(*job, shares=True))] if counted is None else counted
    return [*map(PassRun, _passes(*job, shares=False) or _passes(*job, shares=True))]


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


class _Rows(NamedTuple):
    """Prompts and new tokens of each row, the pages that it needs alone, and the rows' numbers, the longest first."""

    prompts: tuple[int, ...]
    news: tuple[int, ...]
    num_pages: tuple[int, ...]
    longest_first: tuple[int, ...]

    @classmethod
    @lru_cache(maxsize=16)  # a search simulates few samples in hundreds of budgets
    def of(cls, prompts: tuple[int, ...], news: tuple[int, ...], page_size: int) -> "_Rows":
        num_pages = (pages_alone(*row, page_size) for row in zip(prompts, news, strict=True))
        ordered = sorted(range(len(prompts)), key=lambda i: (-news[i], -prompts[i]))
        return cls(prompts, news, tuple(num_pages), tuple(ordered))


class _CountedPasses:
    """Counts the passes of a job; see [Note: counted passes].

    Every step is one of `Scheduler`, with a budget of one set of passes, no window and no shared pages, as long as no
    sequence is preempted.

    Args:
        preempts: count preemption too; else there are no passes if pages run short.
    """

    def __init__(self, rows: _Rows, budget: BatchingBudget, order: PassOrder, *, preempts: bool = False) -> None:
        self._preempts, self._most_swapped, self._num_swapped = preempts, budget.most_swapped_pages, 0
        self._rows = rows
        # Of a preempted sequence the tokens so far count as its prompt, of which those that are swapped out are kept.
        self._prompts, self._news, self._page = list(rows.prompts), list(rows.news), budget.page_size
        self._kept: dict[int, int] = {}
        self._found: dict[int, int] = {}  # full pages of preempted sequences that nothing was written to since
        self._decoding: dict[int, int] = {}  # last passes by number, in the order of admission
        self._num_pages, self._lends, self._max_sequences = budget.num_pages, budget.lends, budget.max_sequences
        self._token_budget = budget.tokens_per_pass
        self._most_tokens = min(budget.tokens_per_pass, order.most_tokens or budget.tokens_per_pass)
        self._most_running = order.most_running(budget.max_sequences)
        self._most_reserved = most_reserved(budget.num_pages)
        self._sums = WorkSums(len(rows.news), sum(rows.num_pages), sum(rows.prompts), sum(rows.news))
        self._waiting = deque(rows.longest_first if budget.order == "longest_first" else range(len(rows.news)))
        self._prompt: tuple[int, int, int] | None = None  # under way: number, tokens computed, pages
        self._num_decodes = self._num_computed = 0  # decoding sequences; their tokens in pages
        self._num_free, self._num_lent, self._place = budget.num_pages, 0, 0
        self._on_boundary = [0] * self._page  # decoding sequences by the passes, modulo a page, that need a page
        self._ending: dict[int, list[int]] = {}  # numbers by their last pass

    def up_to(self, most_passes: float) -> list[PassRun] | None:
        """Return the passes, one more than ``most_passes`` at most; None: pages run short for new tokens."""
        runs: list[PassRun] = []
        num_passes, on_boundary, page, prompts = 0, self._on_boundary, self._page, self._prompts
        while self._sums.count and num_passes <= most_passes:
            lent, self._num_lent = self._num_lent, self._num_spare
            is_short = on_boundary[self._place % page] > self._num_free
            if (is_short and not self._preempts) or self._num_decodes > self._token_budget:
                return None
            if is_short:
                self._preempt()
            self._num_free -= on_boundary[self._place % page]
            if self._found:
                self._lose_pages()
            chunks = [] if is_short else self._chunks()
            decodes, num_context = self._num_decodes, self._num_computed + self._num_decodes
            if not chunks and not decodes:
                return None
            num_tokens, num_samples, num_pairs = decodes, decodes, 0
            for number, begin, end in chunks:
                num_context, count = num_context + end, end - begin
                num_tokens += count
                num_samples += end == prompts[number]
                num_pairs += count * (begin + end + 1) // 2 if count > 1 else 0
            goes_on = not is_short and lent == self._num_lent and num_samples == decodes
            count = self._go_on(chunks, most_passes - num_passes) if goes_on else 1
            num_more = num_tokens - decodes if count > 1 else 0
            size = PassSize(num_tokens, num_samples, num_context, lent, num_pairs)
            runs.append(PassRun(size, count, num_more * num_more if num_more > 1 else 0))
            num_passes += count
            if self._found:
                self._lose_pages()
            self._advance(chunks)
        return runs

    def _go_on(self, chunks: Sequence[tuple[int, int, int]], most_passes: float) -> int:
        """Go on through passes like this one, to the last of them or not as far, and return how many they are.

        They have no prompts, or as much of one that none of them completes. What keeps other prompts out, pages or
        sequences, does so until a sequence ends.
        """
        decodes, chunk, computed, num_pages, reserved = self._num_decodes, 0, 0, 0, 0
        most = most_passes
        if chunks:
            assert self._prompt is not None, "no prompt was completed"
            number, computed, num_pages = self._prompt
            chunk, reserved = computed - chunks[0][1], min(decodes, self._most_reserved)
            if chunk != self._num_for_prompts(decodes + 1):
                return 1
            most = min(most, (self._prompts[number] - computed - 1) // chunk)
        num_more = self._num_until_end(most)
        while num_more:
            taken = max(-(-(computed + num_more * chunk) // self._page) - num_pages, 0) if chunk else 0
            num_left = self._num_free - self._num_needed(num_more) - taken
            if num_left >= reserved:
                break
            num_more //= 2  # pages run short before that
        else:
            return 1
        if chunks:
            self._prompt = number, computed + num_more * chunk, num_pages + taken
        self._place, self._num_free = self._place + num_more, num_left
        self._num_computed += num_more * decodes
        return 1 + num_more

    def _num_until_end(self, most: float) -> int:
        """Return the passes from this one to that in which the next sequence ends, or at most so many."""
        place, ending = self._place, self._ending
        last = place + most - 1
        while place not in ending and place <= last:
            place += 1
        return place - self._place

    def _num_needed(self, num_passes: int) -> int:
        """Return the pages that the decoding sequences take in so many passes after this one."""
        rounds, rest = divmod(num_passes, self._page)
        first = (self._place + 1) % self._page
        last = self._on_boundary[first : first + rest]
        return rounds * self._num_decodes + sum(last) + sum(self._on_boundary[: rest - len(last)])

    def _num_for_prompts(self, num_running: int) -> int:
        """Return the tokens that a pass leaves to prompts beside its decodes."""
        pace = self._sums.pace(max(self._num_pages - self._most_reserved, 1), self._max_sequences)
        return max(min(self._most_tokens, max(pace, num_running)) - self._num_decodes, 0)

    @property
    def _num_spare(self) -> int:
        if self._waiting or not self._lends or self._prompt is not None:
            return 0
        return max(self._num_pages - self._sums.num_pages, 0)

    def _chunks(self) -> list[tuple[int, int, int]]:
        """Return number, begin and end of the chunks of prompts in this pass, with pages for them."""
        num_running = self._num_decodes + (self._prompt is not None)
        if self._prompt is None and not (self._waiting and num_running < self._most_running):
            return []
        num_left = self._num_for_prompts(num_running)
        chunks: list[tuple[int, int, int]] = []
        if self._prompt is not None:
            number, begin, num_pages = self._prompt
            end = min(self._prompts[number], begin + num_left)
            is_last = self._prompts[number] - begin == 1
            most = self._num_free if is_last else self._num_free_beside(num_running - 1)
            taken = min(max(-(-end // self._page) - num_pages, 0), most)
            end = min(end, (num_pages + taken) * self._page)
            self._num_free -= taken
            self._prompt = number, end, num_pages + taken
            chunks += [(number, begin, end)] if end > begin else []
            if end < self._prompts[number]:
                return chunks
            num_left -= end - begin
        prompts, waiting, page = self._prompts, self._waiting, self._page
        most_running = min(self._max_sequences, self._most_running)
        while num_left and waiting and num_running < most_running:
            number, most, is_resuming = waiting[0], self._num_free_beside(num_running), self._kept or self._found
            begin = max(self._kept.get(number, 0), self._found.get(number, 0) * page) if is_resuming else 0
            end = min(prompts[number], begin + num_left)
            wanted = -(-end // page)
            if not most or (num_running and most < wanted):
                break
            waiting.popleft()
            taken = min(wanted, most)
            end = min(end, taken * page)
            if end <= begin:  # alone, and its pages are not enough: it is computed again
                begin = 0
            if is_resuming:
                self._num_swapped -= -(-self._kept.pop(number, 0) // page)
                self._found.pop(number, None)
            self._num_free -= taken
            num_left, num_running = num_left - (end - begin), num_running + 1
            chunks.append((number, begin, end))
            if end < prompts[number]:
                self._prompt = number, end, taken
                break
        return chunks

    def _preempt(self) -> None:
        """Preempt the sequences admitted last, the prompt under way first, until the others get their pages."""
        if self._prompt is not None:
            number, computed, num_pages = self._prompt
            self._prompt = None
            self._put_back(number, computed, num_pages)
        while self._on_boundary[self._place % self._page] > self._num_free and self._num_decodes > 1:
            number, last = self._decoding.popitem()
            num_left = last - self._place + 1
            computed = self._prompts[number] + self._news[number] - 1 - num_left
            self._ending[last].remove(number)
            self._on_boundary[(self._place - computed) % self._page] -= 1
            self._num_decodes, self._num_computed = self._num_decodes - 1, self._num_computed - computed
            self._prompts[number], self._news[number] = computed + 1, num_left
            self._put_back(number, computed, -(-computed // self._page))

    def _put_back(self, number: int, computed: int, num_pages: int) -> None:
        """Let a preempted sequence wait before all others; its pages are swapped out if they may be, or else free."""
        self._num_free += num_pages
        swapped = -(-computed // self._page)
        if 0 < swapped <= self._most_swapped - self._num_swapped:
            self._num_swapped += swapped
            self._kept[number] = computed
        elif computed >= self._page:
            self._found[number] = computed // self._page
        self._waiting.appendleft(number)

    def _lose_pages(self) -> None:
        """Forget what preempted sequences would find of their pages: the last ones' are written to last."""
        num_left = self._num_free
        for number in reversed(list(self._found)):
            found = self._found[number] = min(self._found[number], num_left)
            num_left -= found

    def _num_free_beside(self, num_others: int) -> int:
        return max(self._num_free - min(num_others, self._most_reserved), 0)

    def _advance(self, chunks: Iterable[tuple[int, int, int]]) -> None:
        """Let the decoding sequences go on, and begin with those whose prompts end; drop those that end."""
        self._num_computed += self._num_decodes
        coming, page, prompts, news, rows = self._place + 1, self._page, self._prompts, self._news, self._rows
        for number, _, end in chunks:
            if end < prompts[number]:
                continue
            if self._prompt is not None and self._prompt[0] == number:
                self._prompt = None
            self._num_decodes, self._num_computed = self._num_decodes + 1, self._num_computed + end
            self._on_boundary[(coming - end) % page] += 1
            last = self._place + news[number] - 1
            self._ending.setdefault(last, []).append(number)
            self._decoding[number] = last
        for number in self._ending.pop(self._place, ()):
            num_computed, num_pages = prompts[number] + news[number] - 1, rows.num_pages[number]
            self._num_decodes, self._num_computed = self._num_decodes - 1, self._num_computed - num_computed
            self._on_boundary[(coming - num_computed) % page] -= 1
            self._num_free += num_pages
            del self._decoding[number]
            self._sums.change(-1, -num_pages, -rows.prompts[number], -rows.news[number])
        self._place = coming


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
    if len(passes) == 1:
        return [_times(size, scale) for size in passes[0]]
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
    """Simulated passes in runs: those of one rank, and those that all ranks make together, the same of one alone.

    Each is ``scale`` times as large as it says.
    """

    own: list[PassRun]
    together: list[PassRun]
    scale: float = 1.0

    @classmethod
    def of(cls, ranks: Sequence[list[PassRun]], num_ranks: int, scale: float) -> "RankPasses":
        """Return the passes of a sample, so many times as large."""
        if len(ranks) == 1:
            return cls(ranks[0], ranks[0], scale)
        together = in_step([passes_of(runs) for runs in ranks], num_ranks, scale)
        return cls([run.times(scale) for run in ranks[0]], [*map(PassRun, together)])

    @property
    def most_tokens(self) -> int:
        """Tokens of the largest pass of the rank."""
        return round(self.scale * max(run.first.num_tokens for run in self.own))


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
        is_exact: as for `simulate`.

    ``num_runs``: runs of passes simulated so far.
    """

    def __init__(
        self,
        prompt_lens: Sequence[int],
        new_tokens: Sequence[int],
        window: int | None,
        scale: float = 1.0,
        other: tuple[Sequence[int], Sequence[int]] | None = None,
        num_ranks: int = 1,
        *,
        is_exact: bool = True,
    ) -> None:
        self._is_exact = is_exact
        self._rows = [(prompt_lens, new_tokens), *([other] if other is not None else [])]
        self._scale, self._num_ranks = scale, num_ranks
        self._longest = max(sum(row) for lengths in self._rows for row in zip(*lengths, strict=True))
        self.window, self.num_runs = window, 0
        # Passes of each rank with their token limit, by everything else that affects passes.
        self._found: dict[tuple[object, ...], list[tuple[int, list[list[PassRun]]]]] = {}

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
            if limit == other or max(run.first.num_tokens for runs in ranks for run in runs) < other < limit:
                return RankPasses.of(ranks, self._num_ranks, scale)
        ranks = []
        for prompt_lens, new_tokens in self._rows:
            window = None if self.window is not None and self._longest <= self.window else self.window
            runs = simulate_runs(prompt_lens, new_tokens, budget, window, order, most_passes, is_exact=self._is_exact)
            ranks.append(runs)
            self.num_runs += len(runs)
            if sum(run.num_passes for run in runs) > most_passes:
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
