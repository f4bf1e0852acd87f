"""Decides what each pass computes: Dynamic SplitFuse (DeepSpeed-FastGen, arXiv 2401.08671) over a pool of pages.

A pass computes one token of every running sequence, continues the prompt under way, and adds waiting prompts up to
``token_budget`` tokens or the lower target of `Workload`. The scheduler only decides: it computes nothing, moves no
bytes, and knows no end tokens.

[Note: progress] Sequences run in the order of admission, and get tokens and pages in that order. A sequence is admitted
only if the one before it needs just one token per pass from then on, so at most one prompt is under way, and it is the
last. When pages run short the last sequences are preempted, never the first, and they resume in order before new ones
are admitted. So the first sequence, which fits the pool alone, computes at least one token in every pass; when it is
finished the next one is the first. Nothing waits forever, and no admitted sequence is dropped. All this holds among
sequences that are not in the background, and, while there are none, among those that are; see `claims`.

[Note: a pass ahead] The next pass is scheduled before the tokens of the pass before are known: after `advance` a
sequence's last token is `PENDING`, and `receive` fills it in while the next pass is computed. A sequence that turns out
to have ended with that token wastes one token.
"""

from collections.abc import Iterable

from zinfer.scheduling.chunk_maker import ChunkMaker
from zinfer.scheduling.claims import Claims
from zinfer.scheduling.guessing import chunks_with_guesses
from zinfer.scheduling.page_allocator import PageAllocator, first_needed, pages_alone
from zinfer.scheduling.page_pool import PagePool
from zinfer.scheduling.pass_order import USUAL, PassOrder
from zinfer.scheduling.pass_sets import PassSets
from zinfer.scheduling.preemption import Preemption
from zinfer.scheduling.queues import PreemptedQueue, Running
from zinfer.scheduling.schedule import Chunks, Pass
from zinfer.scheduling.sequence import PENDING, Sequence, SequenceState
from zinfer.scheduling.waiting_queue import Order, WaitingQueue
from zinfer.scheduling.workload import Workload


class Scheduler:
    """Continuous batching of sequences over one pool.

    Call `schedule` and `advance` in turn; between two calls of `advance`, call `receive` for the pass before. The other
    methods may be called at any time, also while a pass is computed: the pass is completed even if a sequence ends.

    Args:
        pool: all pages; only this scheduler takes them.
        token_budget: most tokens of a pass.
        max_sequences: most sequences that run at once.
        most_swapped_pages: as for `PreemptedQueue`; recomputed sequences still reuse pages of the prefix cache.
        order: of admission; see `WaitingQueue`.
        window: as for `PageAllocator`.
        lends: whether spare pages may be lent.
        num_sets: passes that are under way at once; see [Note: sets in flight] in `pass_sets`.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        token_budget: int,
        max_sequences: int,
        most_swapped_pages: int | None = None,
        order: Order = "arrival",
        window: int | None = None,
        lends: bool = True,
        num_sets: int = 1,
    ) -> None:
        assert min(token_budget, max_sequences) >= 1
        self.pool = pool
        self._token_budget = token_budget
        self._max_sequences = max_sequences
        self._window = window
        self._allocator = PageAllocator(pool, window)
        self._lends = lends
        self._queue = WaitingQueue(order)
        self._preempted = PreemptedQueue(most_swapped_pages)
        self._running = Running()
        self._preemption = Preemption(pool, self._allocator, self._running, self._preempted, self._queue)
        self._chunks = ChunkMaker(pool, self._allocator, self._preemption, self._running, self._preempted, self._queue)
        self._last_number = -1
        self._in_flight: Pass | None = None
        self._unpassed: list[tuple[Sequence, tuple[int, ...]]] = []  # swapped out by a pass without chunks
        self._workload = Workload(pool.page_size, shares=window is None)
        self._num_lent = 0
        self._sets = PassSets(num_sets, self._workload, max_sequences)

    @property
    def is_short(self) -> bool:
        """Whether a lack of pages limited the last pass."""
        return self._allocator.is_short

    @property
    def has_preempted(self) -> bool:
        """Whether a preempted or restarted sequence waits to resume."""
        return self._preempted.first() is not None

    @property
    def num_running(self) -> int:
        """Number of running sequences."""
        return len(self._running)

    @property
    def num_background(self) -> int:
        """Number of running sequences in the background."""
        return self._running.num_background

    @property
    def has_foreground(self) -> bool:
        """Whether a sequence runs or waits that is not in the background."""
        firsts = self._preempted.first(), self._queue.first(), next(iter(self._running), None)
        return any(each is not None and not each.is_background for each in firsts)

    @property
    def num_swapped_pages(self) -> int:
        """Number of pages swapped out."""
        return self._preempted.num_swapped_pages

    @property
    def num_spare_pages(self) -> int:
        """Number of pages that no unfinished sequence will need; 0 while one waits or a prompt is under way.

        With a sliding window, a prompt may take more pages at once than it needs in the end.
        """
        if not self._lends or not self.is_decoding:
            return 0
        return max(self.pool.num_pages - self._workload.num_pages, 0)

    @property
    def is_decoding(self) -> bool:
        """Whether nothing waits, and no prompt is under way."""
        return not (self._preempted.first() or self._queue.first() or self._running.prompt)

    @property
    def num_wanted_pages(self) -> int:
        """Number of pages that all unfinished sequences need together; may exceed the pool."""
        return self._workload.num_pages

    def fits(self, num_prompt: int, max_new_tokens: int) -> bool:
        """Whether the pool holds such a sequence alone."""
        return pages_alone(num_prompt, max_new_tokens, self.pool.page_size, self._window) <= self.pool.num_pages

    def add(self, sequence: Sequence) -> None:
        """Add a sequence to the waiting queue; numbers must increase.

        Raises:
            PlanError: the pool could not hold it even alone.
        """
        assert sequence.number > self._last_number, f"sequence {sequence.number} after {self._last_number}"
        assert sequence.state is SequenceState.WAITING
        assert not sequence.output_ids
        self._allocator.check(sequence)
        self._last_number = sequence.number
        self._workload.add(sequence, self._allocator.pages_of(sequence))
        self._queue.add(sequence)

    def schedule(self, order: PassOrder = USUAL) -> Pass | None:
        """Return the next pass, with at least one chunk; None if there is nothing to do."""
        assert self._in_flight is None, "the pass before was not followed by advance"
        new_pass, self._unpassed = Pass(self._num_lent, swapped_out=self._unpassed), []
        self._num_lent = self.num_spare_pages
        self._allocator.is_short = False
        num_pages = max(self.pool.num_pages - self._allocator.most_reserved, 1)
        most_rows = self._sets.most_rows(num_pages, self._running)
        most_running = order.most_running(self._max_sequences)
        budget = min(self._token_budget, order.most_tokens or self._token_budget)
        claims, gave_way = self._preemption.give_way(new_pass, budget, self._max_sequences)
        num_left = self._schedule_running(new_pass, num_pages, most_rows, claims, budget, order)
        sequence: Sequence | None = None
        while num_left and len(self._running) < self._max_sequences and len(new_pass.chunks) < most_rows:
            sequence = self._next(most_running)
            if sequence is None or self._sets.waits(sequence) or (gave_way and sequence.is_background):
                break
            while not (is_admitted := self._chunks.admit(sequence, num_left, new_pass)):
                if not self._preemption.preempt_for(sequence, new_pass):
                    break
                gave_way = True
            if not is_admitted:
                break
            num_left -= new_pass.chunks.ends[-1] - new_pass.chunks.begins[-1]
            if not new_pass.chunks.samples[-1]:  # it took all tokens or all pages, and stays the one prompt under way
                break
        if not new_pass.chunks:
            if any(map(self._sets.waits, (*self._running, *self._preempted))):
                self._unpassed = new_pass.swapped_out
                return None
            assert not self._running, "no running sequence goes on"
            assert sequence is None, "nothing runs, and yet nothing is admitted"
            return None
        self._in_flight = new_pass
        return new_pass

    def advance(self, computed: Pass) -> None:
        """Note that a pass is computed or launched; finishes the sequences that have all their new tokens.

        Args:
            computed: the last pass that `schedule` returned.
        """
        assert computed is self._in_flight, "advance without the pass that was scheduled last"
        self._in_flight = None
        running, window, chunks, num_before = SequenceState.RUNNING, self._window, computed.chunks, len(self._running)
        for sequence, end, samples in zip(chunks.sequences, chunks.ends, chunks.samples, strict=True):
            if sequence.state is not running:
                continue
            end -= len(sequence.guesses)  # which may be wrong
            sequence.num_computed = end
            if sequence.num_to_score:
                sequence.num_scored = max(sequence.num_scored, min(end, sequence.num_to_score))
            if window is not None:
                self.pool.drop_before(sequence, first_needed(end, window))
            if samples:
                output_ids = sequence.output_ids
                output_ids.append(PENDING)
                if len(output_ids) >= sequence.max_new_tokens:
                    self.end(sequence)
        self._sets.note_ended(num_before - len(self._running))

    def receive(self, next_ids: Iterable[tuple[Sequence, int]]) -> None:
        """Fill in the tokens sampled by the pass before; called before the next `advance`."""
        for sequence, token_id in next_ids:
            output_ids = sequence.output_ids
            assert output_ids[-1] == PENDING, f"sequence {sequence.number} has all its tokens"
            output_ids[-1] = token_id
            sequence.guesses = ()

    def accept(self, sequence: Sequence, token_id: int) -> None:
        """Append the token that was sampled behind a right guess of the pass before; called after `receive`.

        It may end the sequence, as `end` does.
        """
        assert not sequence.is_awaited
        sequence.output_ids.append(token_id)
        if sequence.state is SequenceState.RUNNING:  # else it is computed again
            sequence.num_computed += 1
            if self._window is not None:
                self.pool.drop_before(sequence, first_needed(sequence.num_computed, self._window))
        if len(sequence.output_ids) >= sequence.max_new_tokens:
            self.end(sequence)

    def end(self, sequence: Sequence) -> None:
        """End an unfinished sequence in any state; the caller drops its swapped-out pages.

        Its pages stay in the prefix cache until they are needed.
        """
        assert sequence.state is not SequenceState.FINISHED, f"sequence {sequence.number} is FINISHED"
        self._remove(sequence)
        sequence.state = SequenceState.FINISHED
        self._queue.charge(sequence)
        self._workload.remove(sequence, self._allocator.pages_of(sequence))

    def restart(self, sequence: Sequence) -> None:
        """Recompute a sequence from its first token, before all others and without sharing pages.

        It may be finished. Its pending token is dropped; the caller drops its swapped-out pages.
        """
        if sequence.state is not SequenceState.FINISHED:
            self._workload.remove(sequence, self._allocator.pages_of(sequence))
        self._remove(sequence)
        if sequence.output_ids[-1:] == [PENDING]:
            sequence.output_ids.pop()
        sequence.shares, sequence.guesses = False, ()
        self._workload.add(sequence, self._allocator.pages_of(sequence))
        self._preempted.add(sequence, 0)

    def forget(self) -> None:
        """Drop the prefix cache (it may be damaged); running sequences keep their pages unshared."""
        self.pool.forget()
        for sequence in self._running:
            self._workload.stop_sharing(sequence)

    def confine(self, num_pages: int) -> dict[int, int]:
        """Use only the first ``num_pages``, until a call with more; returns the moves of `PagePool.confine`."""
        assert self._in_flight is None, "a pass that was scheduled has its pages"
        moved = self.pool.confine(num_pages)
        for sequence in self._running:
            if not moved.keys().isdisjoint(sequence.pages):
                sequence.pages = [moved.get(page, page) for page in sequence.pages]
        return moved

    def _remove(self, sequence: Sequence) -> None:
        """Remove a sequence from its queue and free its pages."""
        self._unpassed = [each for each in self._unpassed if each[0] is not sequence]
        self._preempted.remove(sequence)
        self._running.remove(sequence)
        self.pool.release(sequence)

    def _next(self, most_running: int) -> Sequence | None:
        """Return the sequence to admit next: preempted ones first, but none in the background before another one.

        None if ``most_running`` run; those in the background do not count for another one: larger passes had more.
        """
        resumed, waiting = self._preempted.first(), self._queue.first()
        if resumed is None or (waiting is not None and resumed.is_background and not waiting.is_background):
            resumed = waiting
        if resumed is None:
            return None
        num_behind = 0 if resumed.is_background else self._running.num_background
        return resumed if len(self._running) - num_behind < most_running else None

    def _schedule_running(
        self, new_pass: Pass, num_pages: int, most_rows: int, claims: Claims, budget: int, order: PassOrder
    ) -> int:
        """Schedule the running sequences, ``most_rows`` at most; returns the tokens of ``budget`` left for others.

        Returns 0 if a sequence was preempted or must wait for pages. Nothing is admitted after a prompt that does not
        reach its end either: it took all tokens or all pages.
        """
        pace = max(self._workload.pace(num_pages, self._max_sequences), self._sets.num_present(self._running))
        share = self._sets.share(pace)
        num_left = min(budget, share)
        num_running, prompt = len(self._running), self._running.prompt
        decodes = self._sets.decodes(self._running, most_rows)
        if claims.num_tokens or 0 < self._running.num_background < num_running:
            most = max(min(num_left - claims.num_tokens, most_rows - claims.num_rows), 0)
            decodes = [each for place, each in enumerate(decodes) if place < most or not each.is_background]
        ready = self._chunks.with_pages(decodes[: min(self._token_budget, share)], new_pass)
        new_pass.chunks = Chunks.of_decodes(ready)
        page_size = self.pool.page_size
        for sequence in [each for each in ready if (each.num_computed + 1) // page_size > each.num_named]:
            self._allocator.publish(sequence, sequence.num_computed + 1)
        if order.guesses and self.is_decoding:
            most_pages = self._allocator.num_free_for_prompts(len(self._running))
            chunks = chunks_with_guesses(ready, order.guesses, budget - len(ready), most_pages, self._allocator)
            if chunks is not None:
                new_pass.chunks, new_pass.has_guesses = chunks, True
        num_left = max(num_left - len(ready), 0)
        if len(self._running) < num_running or len(ready) < len(decodes):
            return 0
        if prompt is None or not num_left or len(ready) == most_rows:
            return num_left
        return num_left - self._chunks.go_on(prompt, num_left, new_pass)
