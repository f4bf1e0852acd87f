"""How far a rank's model has come.

[Note: a rank that hangs]
A process may beat while its passes stand still: the disk that it reads does not answer, or its GPU. The other ranks
then wait for it and stand still, too. What tells it from them is that it waits for no other rank, at least as its host
knows: GPUs wait for each other by themselves. So each process of a job looks at its own models every second, and fails
the job itself (`zinfer.ranks.rank_watch`). Seconds in which the process was stopped do not count.

How long a step may take is known from those before: they are the same work. Only the first passes compile and capture.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_LEAST_S: Final = 50.0
_TIMES: Final = 10  # as long as any step before
_FIRST_PASSES: Final = 16
_FIRST_S: Final = 900.0


class Progress:
    """Counts the steps of one model's passes: their beginnings and ends, blocks, exchanges. Thread-safe.

    Args:
        sees_waits: whether the host waits for other ranks, and not its device.
    """

    def __init__(self, *, sees_waits: bool) -> None:
        self._sees_waits = sees_waits
        self._lock = threading.Lock()
        self._num_at_work = self._num_serving = self._num_waiting = 0
        self._num_steps = self._num_passes = self._num_served = 0
        self._seen_steps = 0  # by the last look
        self._stood_s = self._longest_s = 0.0

    def begin_pass(self) -> None:
        """Note that a pass begins, which may be within another."""
        with self._lock:
            self._num_at_work += 1
            self._num_steps += 1

    def end_pass(self) -> None:
        """Note that a pass is over for the host."""
        with self._lock:
            self._num_at_work -= 1
            self._num_steps += 1
            self._num_passes += 1

    @contextmanager
    def taking_part(self) -> Iterator[None]:
        """Take part in another rank's use of a block, which compiles nothing of this one's."""
        with self._lock:
            self._num_serving += 1
            self._num_steps += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_serving -= 1
                self._num_served += 1
                self._num_steps += 1

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
                self._num_steps += 1

    def note_step(self) -> None:
        """Note that a pass has come further."""
        with self._lock:
            self._num_steps += 1

    def find_hang(self, since_s: float) -> str | None:
        """Return how a pass hangs, if it does; called about every second, by the one watch of the job.

        Args:
            since_s: seconds since the last call, while the process ran.
        """
        with self._lock:
            is_busy = self._num_at_work + self._num_serving > 0
            stands = is_busy and not self._num_waiting and self._num_steps == self._seen_steps
            self._seen_steps = self._num_steps
            num_before = self._num_passes + (0 if self._num_at_work else self._num_served)
        if not stands:
            self._longest_s, self._stood_s = max(self._longest_s, self._stood_s), 0.0
            return None
        self._stood_s += since_s
        is_known = num_before >= _FIRST_PASSES
        if self._stood_s <= (max(_LEAST_S, _TIMES * self._longest_s) if is_known else _FIRST_S):
            return None
        return (
            f"has stood still in a pass for {self._stood_s:.0f} s, where no step took more than "
            f"{max(self._longest_s, 1):.0f} s before: its disk or its GPU hangs"
            + ("" if self._sees_waits else ", or another rank's")
        )
