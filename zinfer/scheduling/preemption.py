"""`Preemption`: takes the pages of the running sequences that come last, when others need them."""

from zinfer.scheduling.claims import Claims
from zinfer.scheduling.page_allocator import PageAllocator
from zinfer.scheduling.page_pool import PagePool
from zinfer.scheduling.queues import PreemptedQueue, Running
from zinfer.scheduling.schedule import Pass
from zinfer.scheduling.sequence import Sequence, SequenceState
from zinfer.scheduling.waiting_queue import WaitingQueue


class Preemption:
    """Preempts sequences of a scheduler, whose queues and pages it shares."""

    def __init__(
        self,
        pool: PagePool,
        allocator: PageAllocator,
        running: Running,
        preempted: PreemptedQueue,
        waiting: WaitingQueue,
    ) -> None:
        self._pool, self._allocator = pool, allocator
        self._running, self._preempted, self._waiting = running, preempted, waiting

    def preempt(self, last: Sequence, new_pass: Pass) -> None:
        """Preempt the last running sequence, which has no chunk in the pass yet."""
        self._running.remove(last)
        pages = tuple(last.pages[last.num_dropped : self._pool.pages_for(last.num_computed)])  # without wrong guesses
        self._preempted.add(last, len(pages))
        if last.state is SequenceState.SWAPPED:
            new_pass.swapped_out.append((last, pages))
        self._pool.release(last)

    def give_way(self, new_pass: Pass, budget: int, max_sequences: int) -> tuple[Claims, bool]:
        """Preempt background sequences for the claims of others; returns the claims, and whether any was preempted."""
        prompt, running = self._running.prompt, self._running
        if not running.has_background:
            return Claims(), False
        waiting = [*self._preempted.foreground(), *self._waiting.foreground()]
        claims = Claims.of(prompt, waiting, budget, self._pool)
        if not claims.num_tokens:
            return claims, False
        num_running, most = len(running), max(max_sequences - claims.num_rows, 0)
        if prompt is not None and prompt.is_background:
            self.preempt(prompt, new_pass)
        num_pages = claims.num_pages + sum(map(self._needs_page, running.decodes()))
        while (last := running.last) is not None and last.is_background:
            if len(running) <= most and self._allocator.num_free_for_prompts(len(running)) >= num_pages:
                break
            num_pages -= self._needs_page(last)
            self.preempt(last, new_pass)
        return claims, len(running) < num_running

    def preempt_for(self, sequence: Sequence, new_pass: Pass) -> bool:
        """Preempt the last background sequence, if it has no chunk in this pass, for one that got too few pages.

        Its claims do not count the pages of the prefix cache that it shares, which are free until then.
        """
        last = self._running.last
        if last is None or not last.is_background or sequence.is_background:
            return False
        if any(each is last for each in new_pass.chunks.sequences):
            return False
        self.preempt(last, new_pass)
        return True

    def _needs_page(self, sequence: Sequence) -> bool:
        """Whether the next token of a running sequence lies on a page that it has to get."""
        return sequence.num_computed >= len(sequence.pages) * self._pool.page_size
