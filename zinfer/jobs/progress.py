"""What a job has done so far, and what is left."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from rich.console import Console

from zinfer.display import Progress
from zinfer.units import clock

_LATELY: Final = 20  # times that the line is shown
_TRUSTED_SHARE: Final = 0.05  # of a batch: so many rows at this run's own pace say as much as the prediction
_MOST_SHARE: Final = 0.99  # of a batch that takes more passes than predicted


@dataclass(frozen=True)
class Forecast:
    """Of rows that share passes; numbers are 0 where they are not known.

    Attributes:
        text: for people.
        tokens_per_s: new tokens a second.
        seconds: of all these rows.
        num_passes: walks over the weights, likewise.
    """

    text: str
    tokens_per_s: float = 0.0
    seconds: float = 0.0
    num_passes: float = 0.0


class Meter(Progress):
    """A job's numbers.

    Attributes:
        phase: "running", or what comes before it.
        num_finished: rows in the output, ``num_skipped`` of which were there before this run.
        batch_rows, batch_share: missing rows of the batch under way, and how much of it is done where passes are not
            counted.
        predicted_row_s, predicted_row_passes: what the plan gives a row, of the many that share passes; 0 where that is
            not known.
        num_tokens: generated in this run; with ``count_tokens`` what that says.
        count_passes: says how many passes were begun.
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
        self.predicted_tokens_per_s = 0.0
        self.predicted_row_s = 0.0
        self.predicted_row_passes = 0.0
        self.count_passes: Callable[[], int] | None = None
        self._passes_before = 0
        self._batch_passes = 0
        self._batch_size = 1
        self._earlier_rows = 0
        self.batch_rows = 0
        self.batch_share = 0.0
        self.started_s = time.monotonic()
        self.running_since_s: float | None = None

    def expect(self, forecast: Forecast, num_rows: int) -> None:
        """Measure the job by the forecast of so many of its rows."""
        self.predicted_tokens_per_s = forecast.tokens_per_s
        self.predicted_row_s = forecast.seconds / num_rows
        self.predicted_row_passes = forecast.num_passes / num_rows

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

    def begin_batch(self, num_missing: int, num_rows: int) -> None:
        """A batch of so many rows begins, ``num_missing`` of which the output lacks."""
        self.batch_rows, self.batch_share, self._batch_size = num_missing, 0.0, num_rows
        self._passes_before = 0 if self.count_passes is None else self.count_passes()
        self._batch_passes = round(self.predicted_row_passes * num_rows)

    def end_batch(self) -> None:
        """All rows of the batch are computed."""
        self._earlier_rows += self.batch_rows
        self.batch_rows, self.batch_share = 0, 0.0

    @property
    def _pass(self) -> int:
        """The pass under way, from 1; 0 where passes are not counted."""
        return 0 if self.count_passes is None or not self.batch_rows else self.count_passes() - self._passes_before

    @property
    def _fresh_rows(self) -> float:
        """Rows of this run that are done, those under way in part: by passes, since rows end late and all at once."""
        share = self.batch_share
        if self._batch_passes and self._pass:
            share = min(self._pass / self._batch_passes, _MOST_SHARE)
        return max(self.num_finished - self.num_skipped, self._earlier_rows + self.batch_rows * share)

    @property
    def eta_s(self) -> float | None:
        """Seconds to the last row; None before anything is known.

        At first as predicted; the more rows are done, the more it goes by this run's own pace.
        """
        fresh, trust = self._fresh_rows, _TRUSTED_SHARE * self._batch_size if self.predicted_row_s else 0.0
        if not fresh + trust:
            return None
        row_s = (self.running_s + trust * self.predicted_row_s) / (fresh + trust)
        return max(0.0, (self.num_rows - self.num_skipped - fresh) * row_s)

    def share(self) -> float | None:
        if self.phase != "running":
            return None
        return (self.num_skipped + self._fresh_rows) / max(1, self.num_rows)

    def line(self) -> str:
        elapsed = clock(time.monotonic() - self.started_s)
        if self.phase != "running":
            return f"zinfer: {self.phase}, {elapsed} elapsed"
        parts = [f"zinfer: running, {self.num_finished}/{self.num_rows} rows"]
        if self._pass:
            parts.append(self._passes_line())
        elif self.batch_rows and self.batch_share:
            parts.append(f"{self.batch_rows} under way at {self.batch_share:.0%}")
        parts.append(f"{self.tokens_per_s_lately():,.1f} tokens/s now, {self.tokens_per_s:,.1f} overall")
        eta = self.eta_s
        parts.append(f"{elapsed} elapsed")
        parts.append(f"ETA {'unknown' if eta is None else clock(eta)}")
        return ", ".join(parts)

    def short_line(self, width: int) -> str:
        if self.phase != "running":
            return self.line()
        eta, speed = self.eta_s, f"{self.tokens_per_s:,.1f} tokens/s"
        if (share := self._speed_share) is not None:
            speed += f" ({share:.0%} of predicted)"
        parts = [
            f"{self.num_finished:,}/{self.num_rows:,} rows",
            speed,
            f"ETA {'unknown' if eta is None else clock(eta)}",
        ]
        if self._pass:
            parts.append(self._passes_line())
        while len(", ".join(parts)) > width and len(parts) > 1:
            parts.pop()
        return ", ".join(parts)

    @property
    def _speed_share(self) -> float | None:
        """How fast this run is, of how fast it was predicted to be; None before the first pass has ended."""
        seconds = self._fresh_rows * self.predicted_row_s
        return seconds / self.running_s if seconds and self.running_s and self._pass != 1 else None

    def _passes_line(self) -> str:
        number, predicted = self._pass, self._batch_passes
        if not predicted:
            return f"pass {number:,}"
        more = f"of {predicted:,}" if number <= predicted else f"({predicted:,} predicted)"
        return f"pass {number:,} {more}"
