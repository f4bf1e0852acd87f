"""Where sequences stand: waiting, running or preempted, each kind in its own order."""

import heapq
from collections import deque
from collections.abc import Iterator
from typing import Literal

from zinfer.scheduling.sequence import Sequence, SequenceState

Order = Literal["arrival", "longest_first"]


class WaitingQueue:
    """Sequences that were never admitted: by arrival, or by prompt tokens with the longest first and ties by arrival.

    So that short prompts do not starve where long ones keep arriving, the longest are sought within a generation: what
    was added before the first of a generation left the queue belongs to it, what comes later forms the next one. So a
    sequence is overtaken only by those that were in the queue with it before its generation had its turn. A batch that
    is added before the first pass is one generation, longest first throughout.
    """

    def __init__(self, order: Order) -> None:
        self._order = order
        self._generation = 0
        self._heap: list[tuple[int, int, int, Sequence]] = []

    def add(self, sequence: Sequence) -> None:
        """Sequences come in the order of their numbers."""
        length = len(sequence.prompt_ids) if self._order == "longest_first" else 0
        heapq.heappush(self._heap, (self._generation, -length, sequence.number, sequence))

    def first(self) -> Sequence | None:
        """The one to admit next, which stays; None where there is none."""
        while self._heap and self._heap[0][-1].state is not SequenceState.WAITING:
            heapq.heappop(self._heap)  # aborted here
        return self._heap[0][-1] if self._heap else None

    def remove_first(self) -> None:
        """Take out what `first` gave."""
        generation, *_ = heapq.heappop(self._heap)
        if self._order == "longest_first":
            self._generation = generation + 1


class Running:
    """Sequences that hold pages, in the order in which they were admitted.

    Between two passes every one but the last has the last token of its output left to compute, and nothing else.
    """

    def __init__(self) -> None:
        self._sequences: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())

    @property
    def last(self) -> Sequence | None:
        """The one that was admitted last."""
        return next(reversed(self._sequences.values()), None)

    @property
    def prompt(self) -> Sequence | None:
        """The last one, where more of it is left than a token of its output."""
        last = self.last
        return last if last and (last.num_tokens - last.num_computed > 1 or not last.output_ids) else None

    def decodes(self) -> list[Sequence]:
        """All but the prompt under way."""
        sequences = list(self._sequences.values())
        return sequences if self.prompt is None else sequences[:-1]

    def add(self, sequence: Sequence) -> None:
        """One more behind the others."""
        self._sequences[sequence.number] = sequence

    def remove(self, sequence: Sequence) -> None:
        """Take one out, if it is here."""
        self._sequences.pop(sequence.number, None)


class PreemptedQueue:
    """Sequences that had to make room; the one that was preempted last comes back first.

    Args:
        most_swapped_pages: the pages of a sequence are kept as long as there are no more than these; the tokens of
            others are computed again. None: no limit.
    """

    def __init__(self, most_swapped_pages: int | None) -> None:
        self.most_swapped_pages = most_swapped_pages
        self.num_swapped_pages = 0
        self._sequences: deque[Sequence] = deque()
        self._swapped: dict[int, int] = {}  # pages by number

    def first(self) -> Sequence | None:
        """The one that comes back next, which stays; None where there is none."""
        return self._sequences[0] if self._sequences else None

    def add(self, sequence: Sequence, num_pages: int) -> None:
        """Put a sequence in front: SWAPPED where its pages are kept, else WAITING with nothing computed."""
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
        """Take a sequence out, if it is here."""
        if sequence in self._sequences:
            self._sequences.remove(sequence)
            self.num_swapped_pages -= self._swapped.pop(sequence.number, 0)
