"""`WaitingQueue`: the sequences that were never admitted, in the order in which they are.

[Note: turns]
Owners take turns by tokens (start-time fair queueing, Goyal et al. 1996). Each has a clock, in tokens: it advances by
the prompt of each sequence that is admitted, and by the output of each that ends. The owner whose clock is behind comes
next. An owner that was idle resumes at the clock of the last admitted owner, so idle time cannot be banked. Of many
idle owners those that are furthest behind are forgotten. So an owner's one sequence waits for a few others, however
many another owner has.
"""

import heapq
from typing import Final, Literal

from zinfer.scheduling.sequence import Sequence, SequenceState

Order = Literal["arrival", "longest_first"]
_MAX_IDLE: Final = 1024
"""Owners with nothing waiting whose clocks are kept."""
_Entry = tuple[int, int, tuple[int, int], int, Sequence]


class _Owner:
    """The sequences of one owner that wait, in the background or not, and its clock.

    Longest first holds within a generation, so that short sequences do not starve while long ones keep arriving.
    Sequences added before the first one of a generation left the queue belong to that generation, later ones to the
    next. So a sequence is overtaken only by sequences of its own generation. A batch that is added before the first
    pass is one generation.
    """

    def __init__(self, clock: int) -> None:
        self.clock = clock
        self.generation = 0
        self.heaps: tuple[list[_Entry], list[_Entry]] = ([], [])

    def first(self, is_background: bool) -> _Entry | None:
        """Return the first entry; drops those that were aborted meanwhile."""
        heap = self.heaps[is_background]
        while heap and heap[0][-1].state is not SequenceState.WAITING:
            heapq.heappop(heap)
        return heap[0] if heap else None

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits."""
        return self.first(False) is None and self.first(True) is None


class WaitingQueue:
    """Sequences by background and owner; an owner's by priority, then by arrival, or longest first, then by arrival.

    The longest has the most new tokens at most, each of which takes a pass; of two with as many, it has the longer
    prompt. So few passes are left to a few sequences at the end. For owners see [Note: turns].
    """

    def __init__(self, order: Order) -> None:
        self._order = order
        self._clock = 0  # of the owner admitted last
        self._owners: dict[str, _Owner] = {}

    def add(self, sequence: Sequence) -> None:
        """Add a sequence; numbers must increase."""
        name = sequence.precedence.owner
        if name not in self._owners and len(self._owners) >= 2 * _MAX_IDLE:
            self._forget_idle()
        owner = self._owners.setdefault(name, _Owner(self._clock))
        if owner.is_idle:
            owner.clock = max(owner.clock, self._clock)
        by_length = self._order == "longest_first"
        length = (-sequence.max_new_tokens, -len(sequence.prompt_ids)) if by_length else (0, 0)
        entry = sequence.precedence.priority, owner.generation, length, sequence.number, sequence
        heapq.heappush(owner.heaps[sequence.is_background], entry)

    def first(self) -> Sequence | None:
        """Return the sequence to admit next, without removing it; None if the queue is empty."""
        for is_background in (False, True):
            found = [
                (owner.clock, entry[3], entry[-1])
                for owner in self._owners.values()
                if (entry := owner.first(is_background)) is not None
            ]
            if found:
                return min(found)[-1]
        return None

    def foreground(self) -> list[Sequence]:
        """Return all sequences that are not in the background, in no order."""
        entries = (entry for owner in self._owners.values() for entry in owner.heaps[False])
        return [entry[-1] for entry in entries if entry[-1].state is SequenceState.WAITING]

    def remove_first(self) -> None:
        """Remove the sequence that `first` returned."""
        sequence = self.first()
        assert sequence is not None, "there is none"
        owner = self._owners[sequence.precedence.owner]
        _, generation, *_ = heapq.heappop(owner.heaps[sequence.is_background])
        if self._order == "longest_first":
            owner.generation = generation + 1
        self._clock = max(self._clock, owner.clock)
        owner.clock += len(sequence.prompt_ids)

    def _forget_idle(self) -> None:
        """Forget idle owners that the clock has passed, and the furthest behind of more than `_MAX_IDLE` others."""
        idle = sorted((owner.clock, name) for name, owner in self._owners.items() if owner.is_idle)
        for place, (clock, name) in enumerate(idle):
            if clock <= self._clock or place < len(idle) - _MAX_IDLE:
                del self._owners[name]

    def charge(self, sequence: Sequence) -> None:
        """Advance the clock of a sequence's owner by its output, once it has ended."""
        if (owner := self._owners.get(sequence.precedence.owner)) is not None:
            owner.clock += len(sequence.output_ids)
            if owner.is_idle and owner.clock <= self._clock:
                del self._owners[sequence.precedence.owner]
