"""The queues of waiting, running and preempted sequences, each in its own order."""

import heapq
from collections import deque
from collections.abc import Iterator
from typing import Literal

from zinfer.scheduling.sequence import Sequence, SequenceState

Order = Literal["arrival", "longest_first"]


class WaitingQueue:
    """Sequences that were never admitted, by arrival, or longest prompt first with ties by arrival.

    Longest first holds within a generation, so that short prompts do not starve while long ones keep arriving.
    Sequences added before the first one of a generation left the queue belong to that generation, later ones to the
    next. So a sequence is overtaken only by sequences of its own generation. A batch that is added before the first
    pass is one generation.
    """

    def __init__(self, order: Order) -> None:
        self._order = order
        self._generation = 0
        self._heap: list[tuple[int, int, int, Sequence]] = []

    def add(self, sequence: Sequence) -> None:
        """Add a sequence; numbers must increase."""
        length = len(sequence.prompt_ids) if self._order == "longest_first" else 0
        heapq.heappush(self._heap, (self._generation, -length, sequence.number, sequence))

    def first(self) -> Sequence | None:
        """Return the sequence to admit next, without removing it; None if the queue is empty."""
        while self._heap and self._heap[0][-1].state is not SequenceState.WAITING:
            heapq.heappop(self._heap)  # aborted in the queue
        return self._heap[0][-1] if self._heap else None

    def remove_first(self) -> None:
        """Remove the sequence that `first` returned."""
        generation, *_ = heapq.heappop(self._heap)
        if self._order == "longest_first":
            self._generation = generation + 1


class Running:
    """Sequences that hold pages, in the order in which they were admitted.

    Between two passes, all but the last have exactly one token left to compute: the last of their output.
    """

    def __init__(self) -> None:
        self._sequences: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())

    @property
    def last(self) -> Sequence | None:
        """The sequence admitted last."""
        return next(reversed(self._sequences.values()), None)

    @property
    def prompt(self) -> Sequence | None:
        """The last sequence, if it has more left to compute than one token of its output."""
        last = self.last
        return last if last and (last.num_tokens - last.num_computed > 1 or not last.output_ids) else None

    def decodes(self) -> list[Sequence]:
        """Return all sequences but the prompt under way."""
        sequences = list(self._sequences.values())
        return sequences if self.prompt is None else sequences[:-1]

    def add(self, sequence: Sequence) -> None:
        """Append a sequence."""
        self._sequences[sequence.number] = sequence

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence, if it is here."""
        self._sequences.pop(sequence.number, None)


class PreemptedQueue:
    """Preempted sequences; the last one preempted returns first.

    Args:
        most_swapped_pages: most pages that are swapped out; sequences beyond are recomputed. None: no limit.
    """

    def __init__(self, most_swapped_pages: int | None) -> None:
        self.most_swapped_pages = most_swapped_pages
        self.num_swapped_pages = 0
        self._sequences: deque[Sequence] = deque()
        self._swapped: dict[int, int] = {}  # pages by number

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def first(self) -> Sequence | None:
        """Return the sequence to resume next, without removing it; None if there is none."""
        return self._sequences[0] if self._sequences else None

    def add(self, sequence: Sequence, num_pages: int) -> None:
        """Put a sequence in front: SWAPPED if its pages are kept, else WAITING with nothing computed."""
        most = self.most_swapped_pages
        if num_pages > 0 and (most is None or self.num_swapped_pages + num_pages <= most):
            self._swapped[sequence.number] = num_pages
            self.num_swapped_pages += num_pages
            sequence.state = SequenceState.SWAPPED
        else:
            sequence.num_computed = 0
            sequence.state = SequenceState.WAITING
        self._sequences.appendleft(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence, if it is here."""
        if sequence in self._sequences:
            self._sequences.remove(sequence)
            self.num_swapped_pages -= self._swapped.pop(sequence.number, 0)
