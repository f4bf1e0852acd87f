"""What a job has done so far, and what is left."""

import time
from collections import deque
from collections.abc import Callable
from typing import Final

from rich.console import Console

from zinfer.display import Progress
from zinfer.units import clock

_LATELY: Final = 20  # times that the line is shown


class Meter(Progress):
    """A job's numbers.

    Attributes:
        phase: "running", or what comes before it.
        num_finished: rows in the output, ``num_skipped`` of which were there before this run.
        batch_rows, batch_share: rows of the padded batch under way, and how much of its longest row is generated.
        predicted_tokens_per_s: what the plan gives the job; None before that is known.
        num_tokens: generated in this run; with ``count_tokens`` what that says.
    """

    def __init__(self, console: Console | None = None) -> None:
        super().__init__(console)
        self.phase = "checking"
        self.num_rows = 0
        self.num_finished = 0
        self.num_skipped = 0
        self.num_tokens = 0
        self.count_tokens: Callable[[], int] | None = None
        self._lately = deque([(time.monotonic(), 0)], maxlen=_LATELY)
        self.predicted_tokens_per_s: float | None = None
        self.batch_rows = 0
        self.batch_share = 0.0
        self.started_s = time.monotonic()
        self.running_since_s: float | None = None

    def add_finished(self, num_rows: int) -> None:
        """So many more rows are in the output."""
        self.num_finished += num_rows

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
        """New tokens of this run, those of rows under way included, over `running_s`."""
        return self._counted() / self.running_s if self.running_s else 0.0

    def tokens_per_s_lately(self) -> float:
        """New tokens a second over the last times that this was asked."""
        now_s, counted = time.monotonic(), self._counted()
        before_s, before = self._lately[0]
        self._lately.append((now_s, counted))
        return (counted - before) / (now_s - before_s) if now_s > before_s else 0.0

    def _counted(self) -> int:
        return self.num_tokens if self.count_tokens is None else self.count_tokens()

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
        parts.append(f"{self.tokens_per_s_lately():.1f} tokens/s now, {self.tokens_per_s:.1f} overall")
        if self.predicted_tokens_per_s:
            parts.append(f"{self.tokens_per_s / self.predicted_tokens_per_s:.0%} of the prediction")
        parts.append(f"{elapsed} elapsed")
        parts.append(f"ETA {'unknown' if eta is None else clock(eta)}")
        return ", ".join(parts)
