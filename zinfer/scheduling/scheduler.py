"""Decides what each pass computes: Dynamic SplitFuse (DeepSpeed-FastGen, arXiv 2401.08671) over a pool of pages.

A pass takes a token of every running sequence, goes on with the prompt that is under way, and fills up with prompts
that wait, so that each walk over the weights carries close to ``token_budget`` tokens, or what `Workload` holds to be
best. Only decides: it computes nothing, moves no bytes, and knows no end tokens.

[Note: progress] Sequences run in the order in which they were admitted, and everything is given out in that order. One
is admitted only where the one before it needs no more than a token a pass from then on, so there is one prompt under
way at most, and it is the last. Where pages run short the last ones are preempted, never the first, and return in the
same order before anything new is admitted. So the first, which fits the pool alone, computes at least a token in every
pass; when it is finished the next one is the first. Nothing waits for ever, and nothing that was admitted is given up.

[Note: a pass ahead] How many tokens a sequence has is known before they are: after `advance` its last token is
`PENDING`, the next pass is scheduled, and `receive` says the token while that one is computed. A sequence that turns
out to have ended there has a token computed for nothing.
"""

from collections.abc import Iterable

from zinfer.scheduling.page_allocator import PageAllocator, first_needed
from zinfer.scheduling.page_pool import PagePool
from zinfer.scheduling.queues import Order, PreemptedQueue, Running, WaitingQueue
from zinfer.scheduling.schedule import Chunk, Chunks, Pass
from zinfer.scheduling.sequence import PENDING, Sequence, SequenceState
from zinfer.scheduling.workload import Workload


class Scheduler:
    """Continuous batching of sequences over one pool.

    The order of calls: `schedule`, `advance`, and again; between two calls of `advance`, `receive` of the pass before.
    The others may be called at any time, also while a pass is computed: it is computed whole, even if a sequence ends
    meanwhile.

    Args:
        pool: all pages that there are; only this scheduler takes them.
        token_budget: most tokens of a pass.
        max_sequences: most sequences that run at once.
        most_swapped_pages: as for `PreemptedQueue`; those pages are copied off the device and back, and of what is
            computed again, pages that can still be found are spared.
        order: of admission; see `WaitingQueue`.
        window: as for `PageAllocator`.
        lends: whether pages are ever to spare.
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
        self._last_number = -1
        self._in_flight: Pass | None = None
        self._workload = Workload(pool.page_size, shares=window is None)
        self._num_lent = 0

    @property
    def is_short(self) -> bool:
        """Whether the last pass carried less, or began less, for want of pages."""
        return self._allocator.is_short

    @property
    def has_preempted(self) -> bool:
        """Whether a sequence has to come back that had to make room, or was started again."""
        return self._preempted.first() is not None

    @property
    def num_running(self) -> int:
        """Sequences that hold pages."""
        return len(self._running)

    @property
    def num_swapped_pages(self) -> int:
        """Pages that are kept of preempted sequences."""
        return self._preempted.num_swapped_pages

    @property
    def num_spare_pages(self) -> int:
        """Pages that nothing that was added so far will need; none as long as something waits or a prompt is under way.

        A prompt may take more pages at once, where a window slides, than it cannot do without.
        """
        if not self._lends or self._preempted.first() or self._queue.first() or self._running.prompt:
            return 0
        return max(self.pool.num_pages - self._workload.num_pages, 0)

    @property
    def num_wanted_pages(self) -> int:
        """Pages that are enough for all that was added so far and is not finished, perhaps more than there are."""
        return self._workload.num_pages

    def fits(self, num_prompt: int, max_new_tokens: int) -> bool:
        """Whether the pool holds such a sequence alone."""
        return self._allocator.pages_alone(num_prompt, max_new_tokens) <= self.pool.num_pages

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait for its turn; sequences come with rising numbers.

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

    def schedule(self) -> Pass | None:
        """The next pass, with one chunk at least; None where nothing is left to do."""
        assert self._in_flight is None, "the pass before was not followed by advance"
        coming = Pass(self._num_lent)
        self._num_lent = self.num_spare_pages
        self._allocator.is_short = False
        num_left = self._go_on(coming)
        sequence: Sequence | None = None
        while num_left and len(self._running) < self._max_sequences:
            sequence = self._preempted.first() or self._queue.first()
            if sequence is None or not self._admit(sequence, num_left, coming):
                break
            num_left -= coming.chunks.ends[-1] - coming.chunks.begins[-1]
        if not coming.chunks:
            assert not self._running, "no running sequence goes on"
            assert sequence is None, "nothing runs, and yet nothing is admitted"
            return None
        self._in_flight = coming
        return coming

    def advance(self, computed: Pass) -> None:
        """Note that a pass is computed, or on its way: a sequence that has all its new tokens with it is finished.

        Args:
            computed: what `schedule` gave last.
        """
        assert computed is self._in_flight, "advance without the pass that was scheduled last"
        self._in_flight = None
        running, window, chunks = SequenceState.RUNNING, self._window, computed.chunks
        for sequence, end, samples in zip(chunks.sequences, chunks.ends, chunks.samples, strict=True):
            if sequence.state is not running:
                continue
            sequence.num_computed = end
            if window is not None:
                self.pool.drop_before(sequence, first_needed(end, window))
            if samples:
                output_ids = sequence.output_ids
                output_ids.append(PENDING)
                if len(output_ids) >= sequence.max_new_tokens:
                    self.end(sequence)

    def receive(self, next_ids: Iterable[tuple[Sequence, int]]) -> None:
        """Say the tokens that the pass before has come to, before the next `advance`."""
        for sequence, token_id in next_ids:
            output_ids = sequence.output_ids
            assert output_ids[-1] == PENDING, f"sequence {sequence.number} has all its tokens"
            output_ids[-1] = token_id

    def end(self, sequence: Sequence) -> None:
        """End a sequence that is not finished, whatever its state; what was swapped out of it is the caller's to drop.

        Its pages can be found until they are needed.
        """
        assert sequence.state is not SequenceState.FINISHED, f"sequence {sequence.number} is FINISHED"
        self._leave(sequence)
        sequence.state = SequenceState.FINISHED
        self._workload.remove(sequence, self._allocator.pages_of(sequence))

    def restart(self, sequence: Sequence) -> None:
        """Compute a sequence again from its first token, in pages that it shares with no other, next of all.

        It may be finished; a token that is pending is dropped, and what was swapped out is the caller's to drop.
        """
        if sequence.state is not SequenceState.FINISHED:
            self._workload.remove(sequence, self._allocator.pages_of(sequence))
        self._leave(sequence)
        if sequence.output_ids[-1:] == [PENDING]:
            sequence.output_ids.pop()
        sequence.shares = False
        self._workload.add(sequence, self._allocator.pages_of(sequence))
        self._preempted.add(sequence, 0)

    def forget(self) -> None:
        """Drop the prefix cache (it may be damaged); running sequences keep their pages unshared."""
        self.pool.forget()
        for sequence in self._running:
            self._workload.keep_apart(sequence)

    def confine(self, num_pages: int) -> dict[int, int]:
        """Use the first ``num_pages`` alone, until it is called with more; returns what `PagePool.confine` does."""
        assert self._in_flight is None, "a pass that was scheduled has its pages"
        moved = self.pool.confine(num_pages)
        for sequence in self._running:
            if not moved.keys().isdisjoint(sequence.pages):
                sequence.pages = [moved.get(page, page) for page in sequence.pages]
        return moved

    def _leave(self, sequence: Sequence) -> None:
        """Take a sequence out of wherever it is."""
        self._preempted.remove(sequence)
        self._running.remove(sequence)
        self.pool.release(sequence)

    def _go_on(self, coming: Pass) -> int:
        """Chunks for those that run; the tokens left for others, none where one of them was preempted or has to wait.

        Nor is anything admitted behind a prompt under way that does not reach its end: it took all tokens or all pages.
        """
        num_pages = max(self.pool.num_pages - self._allocator.most_reserved, 1)
        pace = max(self._workload.pace(num_pages, self._max_sequences), len(self._running))
        num_left = min(self._token_budget, pace)
        num_running, prompt, decodes = len(self._running), self._running.prompt, self._running.decodes()
        going = self._with_room(decodes[:num_left], coming)
        coming.chunks = Chunks.of_decodes(going)
        page_size = self.pool.page_size
        for sequence in [each for each in going if (each.num_computed + 1) // page_size > each.num_named]:
            self._allocator.publish(sequence, sequence.num_computed + 1)
        num_left -= len(going)
        if len(self._running) < num_running or len(going) < len(decodes):
            return 0
        return num_left - self._continue(prompt, num_left, coming) if prompt and num_left else num_left

    def _with_room(self, decodes: list[Sequence], coming: Pass) -> list[Sequence]:
        """Those of the first ones that have a page for their next token: all before the first that has not."""
        page_size, running = self.pool.page_size, SequenceState.RUNNING
        # One comprehension for all: a call for each, or a look at more than this, costs.
        for sequence in [each for each in decodes if each.num_computed >= len(each.pages) * page_size]:
            begin = sequence.num_computed
            if sequence.state is not running or self._extend(sequence, begin + 1, coming) == begin:
                # It waits for a page, and is the last; or it and all after it were preempted for one before.
                decodes = decodes[: decodes.index(sequence)]
                break
        return [each for each in decodes if each.state is running]

    def _continue(self, prompt: Sequence, most_tokens: int, coming: Pass) -> int:
        """Go on with the prompt under way, as far as tokens and pages go; says how many tokens, or all where none."""
        begin, num_tokens = prompt.num_computed, prompt.num_tokens
        end = min(num_tokens, begin + most_tokens)
        if end > len(prompt.pages) * self.pool.page_size:
            end = self._extend(prompt, end, coming)
        if end == begin:
            return most_tokens
        coming.chunks.append(Chunk(prompt, begin, end, end == num_tokens))
        self._allocator.publish(prompt, end)
        return end - begin

    def _extend(self, sequence: Sequence, end: int, coming: Pass) -> int:
        """Take pages for a running sequence up to position ``end``, or as far as they go; says how far."""
        if sequence.num_tokens - sequence.num_computed > 1:
            assert self._running.last is sequence, "a prompt under way is the last one running"
            return self._allocator.extend(sequence, end, self._allocator.num_free_for_prompts(len(self._running) - 1))
        while not self.pool.num_free and (last := self._running.last) is not sequence:
            assert last is not None, "the sequence runs"
            self._make_room(last, coming)
        return self._allocator.extend(sequence, end, self.pool.num_free)

    def _make_room(self, last: Sequence, coming: Pass) -> None:
        """Preempt the last running sequence; it has no chunk in the pass yet, because it is the last."""
        self._running.remove(last)
        pages = tuple(last.pages[last.num_dropped :])
        self._preempted.add(last, len(pages))
        if last.state is SequenceState.SWAPPED:
            coming.swapped_out.append((last, pages))
        self.pool.release(last)

    def _admit(self, sequence: Sequence, num_left: int, coming: Pass) -> bool:
        """Let a sequence run that waits or is preempted, with a chunk in this pass; False if pages run short."""
        given = self._allocator.begin(sequence, num_left, len(self._running))
        if given is None:
            return False
        begin, end, restored = given
        if sequence.state is SequenceState.SWAPPED:
            coming.swapped_in.append((sequence, restored))
        if sequence is self._preempted.first():
            self._preempted.remove(sequence)
        else:
            self._queue.remove_first()
        sequence.num_computed = begin
        sequence.state = SequenceState.RUNNING
        self._running.add(sequence)
        coming.chunks.append(Chunk(sequence, begin, end, end == sequence.num_tokens))
        self._allocator.publish(sequence, end)
        return True
