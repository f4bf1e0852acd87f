"""`ChunkMaker`: adds chunks of sequences to a pass, with the pages that these need."""

from zinfer.scheduling.page_allocator import PageAllocator
from zinfer.scheduling.page_pool import PagePool
from zinfer.scheduling.preemption import Preemption
from zinfer.scheduling.queues import PreemptedQueue, Running
from zinfer.scheduling.schedule import Chunk, Pass
from zinfer.scheduling.sequence import Sequence, SequenceState
from zinfer.scheduling.waiting_queue import WaitingQueue


class ChunkMaker:
    """Adds chunks for a scheduler, whose queues and pages it shares."""

    def __init__(
        self,
        pool: PagePool,
        allocator: PageAllocator,
        preemption: Preemption,
        running: Running,
        preempted: PreemptedQueue,
        waiting: WaitingQueue,
    ) -> None:
        self._pool, self._allocator, self._preemption = pool, allocator, preemption
        self._running, self._preempted, self._waiting = running, preempted, waiting

    def with_pages(self, decodes: list[Sequence], new_pass: Pass) -> list[Sequence]:
        """Return the decodes that get a page for their next token: all before the first that gets none."""
        page_size, running = self._pool.page_size, SequenceState.RUNNING
        # Keep this loop minimal: it runs per sequence per pass.
        for sequence in [each for each in decodes if each.num_computed >= len(each.pages) * page_size]:
            begin = sequence.num_computed
            if sequence.state is not running or self._extend(sequence, begin + 1, new_pass) == begin:
                # It is the last and waits for a page; or it and all after it were preempted for an earlier one.
                decodes = decodes[: decodes.index(sequence)]
                break
        return [each for each in decodes if each.state is running]

    def go_on(self, prompt: Sequence, most_tokens: int, new_pass: Pass) -> int:
        """Add a chunk of the prompt under way, as far as tokens and pages allow.

        Returns the tokens taken; ``most_tokens`` if it does not reach its end, so that nothing else is admitted.
        """
        begin = prompt.num_computed
        end = min(prompt.num_tokens, begin + most_tokens)
        if end > len(prompt.pages) * self._pool.page_size:
            end = self._extend(prompt, end, new_pass)
        if end == begin:
            return most_tokens
        new_pass.chunks.append(_chunk(prompt, begin, end))
        self._allocator.publish(prompt, end)
        return end - begin if end == prompt.num_tokens else most_tokens

    def admit(self, sequence: Sequence, num_left: int, new_pass: Pass) -> bool:
        """Start a waiting or preempted sequence with a chunk in this pass; returns False if pages run short."""
        given = self._allocator.begin(sequence, num_left, len(self._running))
        if given is None:
            return False
        begin, end, restored = given
        if sequence.state is SequenceState.SWAPPED:
            new_pass.swapped_in.append((sequence, restored))
        if sequence is self._preempted.first():
            self._preempted.remove(sequence)
        else:
            self._waiting.remove_first()
        sequence.num_computed = begin
        sequence.state = SequenceState.RUNNING
        self._running.add(sequence)
        new_pass.chunks.append(_chunk(sequence, begin, end))
        self._allocator.publish(sequence, end)
        return True

    def _extend(self, sequence: Sequence, end: int, new_pass: Pass) -> int:
        """Allocate pages for a running sequence up to position ``end``; returns the position they reach."""
        if sequence.num_tokens - sequence.num_computed > 1:
            assert self._running.prompt is sequence, "one prompt at most is under way"
            return self._allocator.extend(sequence, end, self._allocator.num_free_for_prompts(len(self._running) - 1))
        while not self._pool.num_free and (last := self._running.last) is not sequence:
            assert last is not None, "the sequence runs"
            self._preemption.preempt(last, new_pass)
        return self._allocator.extend(sequence, end, self._pool.num_free)


def _chunk(sequence: Sequence, begin: int, end: int) -> Chunk:
    """Return a chunk with the logits that its tokens have to get; tokens to score all come before the first sample."""
    num_extra_logits = max(min(end, sequence.num_to_score) - max(begin, sequence.num_scored), 0)
    return Chunk(sequence, begin, end, end == sequence.num_tokens, num_extra_logits)
