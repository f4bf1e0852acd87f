"""The progress of writing a store."""

import time
from collections.abc import Callable

from rich.console import Console

from zinfer.display import Progress
from zinfer.units import clock, human_bytes


class Meter(Progress):
    """A store's numbers.

    Attributes:
        read_bytes: gives the bytes read by this run.
        total_bytes: that this run reads in all.
        num_blocks, num_written: blocks of the store, and those that are finished, by former runs too.
    """

    def __init__(self, console: Console | None = None) -> None:
        super().__init__(console)
        self.read_bytes: Callable[[], int] = int
        self.total_bytes = 0
        self.num_blocks = 0
        self.num_written = 0
        self.started_s = time.monotonic()

    def start(self, read_bytes: Callable[[], int], total_bytes: int) -> None:
        """Start the clock of the rate; reading begins."""
        self.started_s = time.monotonic()
        self.read_bytes, self.total_bytes = read_bytes, total_bytes

    @property
    def done_bytes(self) -> int:
        """Of ``total_bytes``; margins of aligned reads may make a little more of it."""
        return min(self.read_bytes(), self.total_bytes)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started_s

    @property
    def eta_s(self) -> float | None:
        """Seconds to the end at this run's pace; None before anything is known."""
        done = self.done_bytes
        return (self.total_bytes - done) * self.elapsed_s / done if done else None

    def share(self) -> float | None:
        return self.done_bytes / self.total_bytes if self.total_bytes else None

    def line(self) -> str:
        if not self.total_bytes:
            return f"zinfer: checking, {clock(self.elapsed_s)} elapsed"
        eta, rate = self.eta_s, self.done_bytes / max(self.elapsed_s, 1e-3)
        parts = [
            f"zinfer: {self.num_written}/{self.num_blocks} blocks",
            f"{human_bytes(self.done_bytes)} of {human_bytes(self.total_bytes)} read",
            f"{human_bytes(round(rate))}/s",
            f"{clock(self.elapsed_s)} elapsed",
            f"ETA {'unknown' if eta is None else clock(eta)}",
        ]
        return ", ".join(parts)
