"""Sequences that were never admitted, in the order in which they will be."""

import heapq
from typing import Final, Literal

from zinfer.scheduling.sequence import Sequence, SequenceState

Order = Literal["arrival", "longest_first"]

ORDERS: Final[tuple[Order, ...]] = ("arrival", "longest_first")


class WaitingQueue:
    """A queue by arrival, or by prompt tokens with the longest first and ties by arrival.

    So that short prompts do not starve where long ones keep arriving, the longest are sought within a generation: what
    was added before the first of a generation left the queue belongs to it, what comes later forms the next one. So a
    sequence is overtaken only by those that were in the queue with it before its generation had its turn. A batch that
    is added before the first pass is one generation, longest first throughout.
    """

    def __init__(self, order: Order) -> None:
        assert order in ORDERS
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
