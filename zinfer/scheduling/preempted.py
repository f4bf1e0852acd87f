"""Sequences that had to make room, in the order in which they come back, and how many of their pages are kept."""

from collections import deque

from zinfer.scheduling.sequence import Sequence, SequenceState


class PreemptedQueue:
    """A queue whose first one was set aside last.

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
        if self._may_keep(num_pages):
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

    def _may_keep(self, num_pages: int) -> bool:
        most = self.most_swapped_pages
        return num_pages > 0 and (most is None or self.num_swapped_pages + num_pages <= most)
