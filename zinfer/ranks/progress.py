"""How far a rank's model has come.

[Note: a rank that hangs]
A process may beat while its passes stand still: the disk that it reads does not answer, or its GPU. The other ranks
then wait for it and stand still, too. What tells it from them is that it waits for no other rank. So each process of a
job looks at its own models, and fails the job itself (`zinfer.ranks.rank_watch`).

How long a step may take is known from those before: they are the same work. Only the first passes compile and capture.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_LEAST_S: Final = 50.0
_TIMES: Final = 10  # as long as any step before
_FIRST_PASSES: Final = 16
_FIRST_S: Final = 900.0


class Progress:
    """Counts the steps of one model's passes: their beginnings and ends, blocks, exchanges. Thread-safe.

    Attributes:
        num_steps: so far.
        longest_s: the longest time from one step to the next in a pass, waits for other ranks included.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_at_work = self._num_waiting = 0
        self._num_passes = 0
        self._stepped_s = time.monotonic()
        self.num_steps, self.longest_s = 0, 0.0

    def begin_pass(self) -> None:
        """Note that a pass begins, which may be within another."""
        with self._lock:
            self._note(+1)

    def end_pass(self) -> None:
        """Note that a pass is over for the host."""
        with self._lock:
            self._note(-1)
            self._num_passes += 1

    @contextmanager
    def in_pass(self) -> Iterator[None]:
        """Take part in a pass."""
        self.begin_pass()
        try:
            yield
        finally:
            self.end_pass()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Wait for other ranks, which is a step once it is over."""
        with self._lock:
            self._num_waiting += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_waiting -= 1
                self._note()

    def note_step(self) -> None:
        """Note that a pass has come further."""
        with self._lock:
            self._note()

    @property
    def is_standing(self) -> bool:
        """Whether a pass is under way which waits for no other rank."""
        with self._lock:
            return self._num_at_work > 0 and not self._num_waiting

    @property
    def most_s(self) -> float:
        """Seconds from one step to the next, after which the pass hangs."""
        return max(_LEAST_S, _TIMES * self.longest_s) if self._num_passes >= _FIRST_PASSES else _FIRST_S

    def _note(self, change: int = 0) -> None:
        now_s = time.monotonic()
        if self._num_at_work:
            self.longest_s = max(self.longest_s, now_s - self._stepped_s)
        self._num_at_work += change
        self._stepped_s = now_s
        self.num_steps += 1


class Standstill:
    """For how long the passes of one model stand still, as its process looks at it now and then."""

    def __init__(self) -> None:
        self._num_steps, self._stood_s = 0, 0.0

    def look(self, progress: Progress, since_s: float) -> str | None:
        """Return how a pass hangs, if it does.

        Args:
            progress: of the model.
            since_s: seconds since the last look, while the process ran.
        """
        stands = progress.is_standing and progress.num_steps == self._num_steps
        self._num_steps = progress.num_steps
        self._stood_s = self._stood_s + since_s if stands else 0.0
        if self._stood_s <= progress.most_s:
            return None
        return (
            f"has stood still in a pass for {self._stood_s:.0f} s, where no step took more than "
            f"{progress.longest_s:.1f} s before: its disk or its GPU hangs"
        )
