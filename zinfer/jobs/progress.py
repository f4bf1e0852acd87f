"""What a job has done so far, and what is left."""

import time

from rich.console import Console

from zinfer.display import Progress
from zinfer.units import clock


class Meter(Progress):
    """A job's numbers.

    Attributes:
        phase: "running", or what comes before it.
        num_finished: rows in the output, ``num_skipped`` of which were there before this run.
        batch_rows, batch_share: rows of the batch under way, and how much of its longest row is generated.
    """

    def __init__(self, console: Console | None = None) -> None:
        super().__init__(console)
        self.phase = "checking"
        self.num_rows = 0
        self.num_finished = 0
        self.num_skipped = 0
        self.num_tokens = 0
        self.batch_rows = 0
        self.batch_share = 0.0
        self.started_s = time.monotonic()
        self.running_since_s: float | None = None

    def begin(self, phase: str) -> None:
        """Enters a phase; the clock of tokens/s starts with the first "running"."""
        self.phase = phase
        if phase == "running" and self.running_since_s is None:
            self.running_since_s = time.monotonic()

    @property
    def running_s(self) -> float:
        """Seconds since the first batch began."""
        return 0.0 if self.running_since_s is None else time.monotonic() - self.running_since_s

    @property
    def tokens_per_s(self) -> float:
        """New tokens of this run, those of the batch under way included, over `running_s`."""
        return self.num_tokens / self.running_s if self.running_s else 0.0

    @property
    def eta_s(self) -> float | None:
        """Seconds to the last row at this run's pace of rows; None before anything is known."""
        fresh = self.num_finished - self.num_skipped + self.batch_rows * self.batch_share
        if not fresh:
            return None
        return max(0.0, (self.num_rows - self.num_skipped - fresh) * self.running_s / fresh)

    def share(self) -> float | None:
        if self.phase != "running":
            return None
        return (self.num_finished + self.batch_rows * self.batch_share) / max(1, self.num_rows)

    def line(self) -> str:
        elapsed = clock(time.monotonic() - self.started_s)
        if self.phase != "running":
            return f"zinfer: {self.phase}, {elapsed} elapsed"
        parts = [f"zinfer: running, {self.num_finished}/{self.num_rows} rows"]
        if self.batch_rows:
            parts.append(f"{self.batch_rows} more at {self.batch_share:.0%}")
        eta = self.eta_s
        parts.append(f"{self.tokens_per_s:.1f} tokens/s")
        parts.append(f"{elapsed} elapsed")
        parts.append(f"ETA {'unknown' if eta is None else clock(eta)}")
        return ", ".join(parts)
