"""Continuous batching: requests are added, each step runs a pass over the model and returns completions."""

import math
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import compress
from typing import Final

import torch

from zinfer.batching.handle import Event
from zinfer.batching.page_lender import IdlePageLender
from zinfer.batching.pass_meter import PassMeter
from zinfer.batching.prompt_scorer import PromptScorer
from zinfer.batching.ragged import BatchBuilder, Pending
from zinfer.batching.request import Request
from zinfer.batching.runner import PassRunner
from zinfer.batching.running_request import RunningRequest
from zinfer.batching.running_requests import Drawing, RunningRequests
from zinfer.batching.stage_tokens import StageTokens
from zinfer.batching.verification import rows_behind
from zinfer.engine.finite_check import FiniteWatch
from zinfer.kv_cache.base import PageCache
from zinfer.kv_cache.device import KVCache
from zinfer.planning.job_estimator import JobEstimator
from zinfer.planning.kv_budget import BatchingBudget
from zinfer.planning.pass_sizes import PIECE_PARTS
from zinfer.sampling.async_copy import send
from zinfer.sampling.sampler import Drawn, Sampler
from zinfer.sampling.structure import token_masks
from zinfer.scheduling.pass_order import USUAL, PassOrder
from zinfer.scheduling.schedule import Pass, PassSize
from zinfer.scheduling.sequence import SequenceState
from zinfer.scheduling.speculation import Speculation

_MOST_NOTED_PASSES: Final = 1 << 18
_PIECE_LOGITS: Final = 1 << 25
"""Logits of a pass that scores prompts are computed in pieces of so many, 64 MB in 16 bits."""
_FOREGROUND_STAYS_S: Final = 1.0  # chats whose answers end together are back within milliseconds


class Batcher:
    """Runs requests in one ragged batch after the other; called by one thread.

    Passes are pipelined: pass n+1 launches before the host has seen pass n's tokens, which stay on the device. So
    scheduling, detokenizing and other work between two steps cost the device no time. Among stages of a pipeline, as
    many passes are under way as there are stages, each of other sequences (`zinfer.scheduling.pass_sets`).

    Attributes:
        pass_sizes: of the passes since `begin`, limited to the last ones.
        pass_ends_s: when the tokens of each pass were on the host (`time.perf_counter`), without the pass under way.
        received_ids: the tokens taken last, of the pass before.
        meter: of all passes.
        num_left_out: passes that were not computed, since all their tokens are known.

    Args:
        runner: runs the passes.
        cache: the runner's cache.
        sampler: chooses the tokens.
        budget: sizes of the passes and of the cache.
        estimator: limits the tokens of passes.
        window: the most tokens that any layer attends to; None if a layer attends to all.
        tokens: brings tokens from the last stage of a pipeline to the others.
        speculation: guesses tokens; None: nothing does.
    """

    def __init__(
        self,
        runner: PassRunner,
        cache: PageCache,
        sampler: Sampler,
        budget: BatchingBudget,
        estimator: JobEstimator,
        window: int | None = None,
        tokens: StageTokens | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        self._estimator, self._target = estimator, estimator.target
        self._speculation = speculation
        self._events: list[Event] = []  # of tokens that were taken for a pass's guesses
        self._runner = runner
        self._cache = cache
        self._sampler = sampler
        self._builder = BatchBuilder(cache.page_size, cache.device, budget.most_part_tokens, cache.stride)
        self._budget = budget
        self._window = window
        # Pages in host memory take no device memory that could be lent.
        self._lender = IdlePageLender(cache, runner.model) if isinstance(cache, KVCache) else None
        self._scheduler = budget.scheduler(window)
        self._tokens = tokens
        self._drawn: deque[Drawing] = deque()  # of passes whose tokens were not taken
        self._most_drawn = max(1, budget.num_sets - 1)  # before another pass is launched
        self._watch = FiniteWatch(runner.model.module, runner.model.named_layers)
        self._requests = RunningRequests(self._scheduler, cache, self._watch, speculation)
        self.num_tokens = self.num_left_out = 0
        self._foreground_s = -math.inf  # when a sequence was last there that is not in the background
        self.pass_sizes: list[PassSize] = []
        self.pass_ends_s: list[float] = []
        self.received_ids: Sequence[int] = ()
        self.meter = PassMeter()

    def begin(self, requests: Sequence[Request]) -> None:
        """Forget the passes so far; no request may be unfinished.

        Args:
            requests: the first ones to come.
        """
        if self._requests.has_known:  # not all pages were computed
            self._renew()
        self._requests.begin(requests)
        self._drawn.clear()  # tokens for requests that had ended
        self.pass_sizes.clear()
        self.pass_ends_s.clear()

    def order(self) -> PassOrder:
        """Return the order of the next pass, from the seconds of those before and the tokens so far.

        One rank's order is for all in step.
        """
        order = self._estimator.order if self._has_foreground() else self._estimator.background_order
        if self._speculation is None or not self._scheduler.is_decoding:
            return order
        most = self._speculation.most_guesses(self._scheduler.num_running)
        if most < 1:
            return order
        self._take_all()
        rows = [each for each in self._requests.by_number.values() if each.may_be_guessed]
        return order._replace(guesses=self._speculation.guess([each.sequence for each in rows], most))

    def _has_foreground(self) -> bool:
        """Whether a sequence that is not in the background runs or waits, or did so a moment ago."""
        now_s = time.perf_counter()
        if self._scheduler.has_foreground:
            self._foreground_s = now_s
        return now_s - self._foreground_s <= _FOREGROUND_STAYS_S

    def step(self, order: PassOrder = USUAL) -> list[Event]:
        """Launch a pass and, while it is computed, take the tokens of an earlier one. After an exception call `abort`.

        Returns:
            The completions of the earlier pass, and the tokens of requests that want them one by one; empty if no
            request is unfinished.
        """
        if order.guesses is not None or any(each.guesses for each in self._drawn):
            self._take_all()
        before, self._events = self._events, []
        if self._lender is not None:
            self._lender.adjust(self._scheduler)
        scheduled = self._scheduler.schedule(order)
        computed = None if scheduled is None else self._launch(scheduled)
        is_due = len(self._drawn) == self._most_drawn or (scheduled is None and len(self._drawn) > 0)
        events = self._receive(self._drawn.popleft()) if is_due else []
        if scheduled is not None:
            self._drawn.append(replace(self._draw(scheduled, computed), is_settled=self._runner.is_settled))
            self._scheduler.advance(scheduled)
        return [*before, *events]

    def _take_all(self) -> None:
        """Take the tokens of all passes, unless several are under way at once, of other sequences each."""
        while self._drawn and self._budget.num_sets == 1:
            self._events += self._receive(self._drawn.popleft())

    def add(self, request: Request) -> None:
        """As `RunningRequests.add`."""
        self._requests.add(request)

    def cancel(self, requests: Collection[Request]) -> list[Event]:
        """As `RunningRequests.cancel`, between two passes."""
        return self._requests.cancel(requests)

    @property
    def has_known(self) -> bool:
        """As `RunningRequests.has_known`."""
        return self._requests.has_known

    @property
    def num_new_tokens(self) -> int:
        """Tokens that requests have drawn and taken."""
        return self._requests.num_new_tokens

    @property
    def num_running(self) -> int:
        """Sequences that hold pages."""
        return self._scheduler.num_running

    @property
    def num_background(self) -> int:
        """Those of them in the background."""
        return self._scheduler.num_background

    @property
    def num_used_pages(self) -> int:
        """Pages that sequences hold."""
        return self._scheduler.pool.num_used

    @property
    def num_swapped_pages(self) -> int:
        """Pages of preempted sequences."""
        return self._scheduler.num_swapped_pages

    def fits(self, num_prompt: int, max_new_tokens: int) -> bool:
        """Whether the cache could hold such a sequence alone."""
        return self._scheduler.fits(num_prompt, max_new_tokens)

    def abort(self) -> None:
        """Drop all requests after a pass that failed, and the prefix cache: the pass may have left pages unfilled."""
        for number in self._requests.by_number:
            self._cache.forget(number)
        self.close()
        self._renew()

    def forget_prefixes(self) -> None:
        """Drop the prefix cache; no request may be unfinished."""
        assert not self._requests.by_number
        self._renew()

    def close(self) -> None:
        """Drop everything for good, whatever state a pass is in; the counters stay."""
        self._drawn.clear()
        self._events.clear()
        self._scheduler = self._budget.scheduler(self._window)
        self._requests.drop(self._scheduler)

    def _renew(self) -> None:
        """Begin with an empty scheduler."""
        if self._lender is not None:
            self._lender.take_back()
        self._scheduler = self._budget.scheduler(self._window)
        self._requests.drop(self._scheduler)

    def _launch(self, scheduled: Pass) -> tuple[torch.Tensor, PromptScorer | None] | None:
        """Swap pages, and launch a pass unless none of its tokens need be computed; returns as `_forward`."""
        for sequence, pages in scheduled.swapped_out:
            self._cache.swap_out(sequence.number, pages)
        for sequence, pages in scheduled.swapped_in:
            self._cache.swap_in(sequence.number, pages)
        if self._requests.needs(scheduled.chunks):
            return self._forward(scheduled)
        self.num_left_out += 1
        return None

    def _forward(self, scheduled: Pass) -> tuple[torch.Tensor, PromptScorer | None]:
        """Launch a pass; returns the logits of its samples, and what scores prompts in it."""
        if not any(each.is_computed for each in self._drawn):
            self.meter.begin()
        self._cache.expect(scheduled.chunks)
        pending = None
        if self._drawn and isinstance(drawn := self._drawn[-1].result, Drawn):
            numbers = [sequence.number for sequence in self._drawn[-1].sequences]
            pending = Pending(drawn.token_ids, dict(zip(numbers, range(len(numbers)), strict=True)))
        # The watch uses module hooks, which a replayed pass does not call.
        may_replay = self._runner.replays and not self._watch.is_on
        bucket = self._runner.bucket_of(scheduled.chunks, self._budget.most_part_tokens) if may_replay else None
        batch = self._builder.build(scheduled.chunks, pending, bucket)
        self.pass_sizes.append(scheduled.size)
        self.num_tokens += self.pass_sizes[-1].num_tokens
        if scheduled.chunks.extra_logits and not scheduled.has_guesses:
            scorer = PromptScorer(self._sampler, scheduled.chunks, self._requests.by_number)
            most = min(_PIECE_LOGITS, PIECE_PARTS * self._budget.part_logits) // self._sampler.vocab_size
            self._runner.run_in_pieces(batch, max(most, 1), scorer.take)
            return scorer.sampled, scorer
        begin_s = time.perf_counter()
        logits = self._runner.run(batch)
        if self._target is not None and bucket is None and self._cache.device.type == "cuda":
            self._target.observe_launch(time.perf_counter() - begin_s)
        return logits if bucket is None else logits[: sum(scheduled.chunks.samples)], None

    def _draw(self, scheduled: Pass, computed: tuple[torch.Tensor, PromptScorer | None] | None) -> Drawing:
        """Draw the next tokens of the sequences that have not ended since the pass was scheduled.

        Args:
            computed: of `_forward`; None: all tokens are known.
        """
        running = SequenceState.RUNNING  # looking the enum up for each sequence is slow
        sampling = list(compress(scheduled.chunks.sequences, scheduled.chunks.samples))
        sequences = [sequence for sequence in sampling if sequence.state is running]
        writing = self._requests.by_number
        rows = [writing[sequence.number] for sequence in sequences]
        guesses = [sequence.guesses for sequence in sequences] if scheduled.has_guesses else []
        known = self._requests.known(rows, guesses)
        if computed is None:
            _find_ends(rows)
            token_ids = send([*known.values()], torch.int64, self._cache.device)
            return Drawing(sequences, rows, Drawn(token_ids), self._watch.take(), (), guesses, known, is_computed=False)
        logits, scorer = computed
        spans = scorer.spans if scorer is not None else ()
        if self._tokens is not None and not self._tokens.is_last:
            self._watch.take()  # of this stage's layers: the last one says for all whether its own are broken
            _find_ends(rows)
            found = self._tokens.expect()
            return Drawing(sequences, rows, found, found, spans, guesses, known)
        if len(sequences) < len(sampling):
            behind = [sequence for sequence in sampling for _ in range(1 + len(sequence.guesses))]
            places = [place for place, sequence in enumerate(behind) if sequence.state is running]
            logits = logits[send(places, torch.int64, logits.device)]
        scores = scorer.scores if scorer is not None else ()
        drawing = [each.row for each in rows]
        if guesses:
            pairs = zip(drawing, guesses, strict=True)
            drawing = [row for own, following in pairs for row in rows_behind(own, following)]
        drawn = self._sampler.draw(logits, drawing, scores)
        looks = self._watch.take()
        if self._tokens is None:
            return Drawing(sequences, rows, drawn, looks, spans, guesses, known)
        shared = self._tokens.share(drawn, looks)
        return Drawing(sequences, rows, shared, shared, spans, guesses, known)

    def _receive(self, drawn: Drawing) -> list[Event]:
        """Take the tokens of an earlier pass; returns the requests they complete, and the tokens of others."""
        sampled = drawn.take()
        self._runner.model.check_ranks()
        self.received_ids = sampled.token_ids
        if drawn.is_computed:
            self._note_end(drawn.is_settled)
        return self._requests.receive(drawn, sampled)

    def _note_end(self, is_settled: bool) -> None:
        """Note that a pass has ended. The target learns nothing from captures, nor from passes that precede them."""
        self.pass_ends_s.append(time.perf_counter())
        size = self.pass_sizes[len(self.pass_ends_s) - 1]
        self.meter.end(size.num_tokens)
        if self._target is not None and len(self.pass_ends_s) > 1 and is_settled:
            self._target.observe(size.num_tokens, self.pass_ends_s[-1] - self.pass_ends_s[-2])
        if len(self.pass_ends_s) > _MOST_NOTED_PASSES:  # the batcher has not been idle for days
            del self.pass_sizes[: _MOST_NOTED_PASSES // 2], self.pass_ends_s[: _MOST_NOTED_PASSES // 2]


def _find_ends(rows: Sequence[RunningRequest]) -> None:
    """Find which outputs are over by their grammars, as drawing does."""
    if matchers := [each.row.matcher for each in rows if each.row.matcher is not None]:
        token_masks(matchers)
