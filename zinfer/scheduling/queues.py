"""The queues of waiting, running and preempted sequences, each in its own order; background sequences come last."""

import heapq
from collections import deque
from collections.abc import Iterator
from itertools import chain
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
        self._heap: list[tuple[bool, int, int, int, Sequence]] = []

    def add(self, sequence: Sequence) -> None:
        """Add a sequence; numbers must increase."""
        length = len(sequence.prompt_ids) if self._order == "longest_first" else 0
        heapq.heappush(self._heap, (sequence.is_background, self._generation, -length, sequence.number, sequence))

    def first(self) -> Sequence | None:
        """Return the sequence to admit next, without removing it; None if the queue is empty."""
        while self._heap and self._heap[0][-1].state is not SequenceState.WAITING:
            heapq.heappop(self._heap)  # aborted in the queue
        return self._heap[0][-1] if self._heap else None

    def foreground(self) -> list[Sequence]:
        """Return all sequences that are not in the background, in no order."""
        first = self.first()
        if first is None or first.is_background:
            return []
        each = (entry[-1] for entry in self._heap if not entry[0])
        return [sequence for sequence in each if sequence.state is SequenceState.WAITING]

    def remove_first(self) -> None:
        """Remove the sequence that `first` returned."""
        _, generation, *_ = heapq.heappop(self._heap)
        if self._order == "longest_first":
            self._generation = generation + 1


class Running:
    """Sequences that hold pages, in the order in which they were admitted, those in the background after the others.

    Between two passes, all but one have exactly one token left to compute: the last of their output. That one is the
    last of its kind.
    """

    def __init__(self) -> None:
        self._foreground: dict[int, Sequence] = {}
        self._background: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._foreground) + len(self._background)

    def __iter__(self) -> Iterator[Sequence]:
        return chain(self._foreground.values(), self._background.values())

    @property
    def num_background(self) -> int:
        """Number of sequences in the background."""
        return len(self._background)

    @property
    def last(self) -> Sequence | None:
        """The sequence in the background that was admitted last; without one, the last of the others."""
        return next(reversed((self._background or self._foreground).values()), None)

    @property
    def prompt(self) -> Sequence | None:
        """The sequence that has more left to compute than one token of its output."""
        for kind in (self._background, self._foreground):
            last = next(reversed(kind.values()), None)
            if last and (last.num_tokens - last.num_computed > 1 or not last.output_ids):
                return last
        return None

    def decodes(self) -> list[Sequence]:
        """Return all sequences but the prompt under way."""
        prompt = self.prompt
        return list(self) if prompt is None else [each for each in self if each is not prompt]

    def add(self, sequence: Sequence) -> None:
        """Append a sequence."""
        (self._background if sequence.is_background else self._foreground)[sequence.number] = sequence

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence, if it is here."""
        (self._background if sequence.is_background else self._foreground).pop(sequence.number, None)


class PreemptedQueue:
    """Preempted sequences; the last one preempted returns first.

    Args:
        most_swapped_pages: most pages that are swapped out; sequences beyond are recomputed. None: no limit.
    """

    def __init__(self, most_swapped_pages: int | None) -> None:
        self.most_swapped_pages = most_swapped_pages
        self.num_swapped_pages = 0
        self._foreground: deque[Sequence] = deque()
        self._background: deque[Sequence] = deque()
        self._swapped: dict[int, int] = {}  # pages by number

    def __iter__(self) -> Iterator[Sequence]:
        return chain(self._foreground, self._background)

    def first(self) -> Sequence | None:
        """Return the sequence to resume next, without removing it; None if there is none."""
        return next(iter(self), None)

    def foreground(self) -> list[Sequence]:
        """Return all sequences that are not in the background, in order."""
        return list(self._foreground)

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
        self._queue_of(sequence).appendleft(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence, if it is here."""
        queue = self._queue_of(sequence)
        if sequence in queue:
            queue.remove(sequence)
            self.num_swapped_pages -= self._swapped.pop(sequence.number, 0)

    def _queue_of(self, sequence: Sequence) -> deque[Sequence]:
        return self._background if sequence.is_background else self._foreground
