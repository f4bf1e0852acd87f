"""The queues of running and preempted sequences, each in its own order; background sequences come last."""

from collections import deque
from collections.abc import Iterator
from itertools import chain

from zinfer.scheduling.sequence import Sequence, SequenceState


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
    def has_background(self) -> bool:
        """Whether a sequence in the background runs."""
        return bool(self._background)

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
