"""Transfers of blocks into device memory, or into their homes."""

import threading
from dataclasses import dataclass

import torch

from zinfer.offload.source import Source
from zinfer.offload.stream import CopyStream, Event


@dataclass(frozen=True)
class Target:
    """Memory to fill (uint8, the whole slab), by copies on ``stream`` after ``reusable_after``."""

    memory: torch.Tensor
    stream: CopyStream
    reusable_after: Event | None = None


class Transfer:
    """One transfer of a block. A lane runs it, one thread waits for it.

    ``loaded_at_s`` is when its last part was in a staging slot (`time.perf_counter`).
    """

    def __init__(self, name: str, source: Source, target: Target) -> None:
        self.name = name
        self.source = source
        self.target = target
        self.loaded_at_s = 0.0
        self.finished_at_s = 0.0
        self._sent: Event | None = None
        self._failure: BaseException | None = None
        self._over = threading.Event()

    @property
    def is_over(self) -> bool:
        """Whether it has ended, with success or not."""
        return self._over.is_set()

    @property
    def has_failed(self) -> bool:
        """Whether a part has failed so far; the rest is not copied."""
        return self._failure is not None

    def own_failure(self) -> BaseException | None:
        """Return the first failure so far, without waiting."""
        return self._failure

    def fail(self, failure: BaseException) -> None:
        """Record a failure; the first one is kept."""
        self._failure = self._failure or failure

    def finish(self, sent: Event | None, at_s: float) -> None:
        """Wake the waiter. Nothing writes to the target after ``sent``; None if the event could not be recorded."""
        self._sent, self.finished_at_s = sent, at_s
        self._over.set()

    def wait(self) -> None:
        """Block until it is over."""
        self._over.wait()

    def failure(self) -> BaseException | None:
        """Wait until it is over; returns its error, or None."""
        self.wait()
        return self._failure

    def raise_failure(self) -> None:
        """Wait until it is over; raises its error, if any."""
        failure = self.failure()
        if failure is not None:
            raise failure

    def sent(self) -> Event:
        """Return the event after which the target is full; only for a transfer that did not fail."""
        assert self._sent is not None
        return self._sent

    def last_write(self) -> Event | None:
        """Return the event after which nothing writes to the target; only once the transfer is over."""
        return self._sent
