"""Progress of a job: rows done, speed and remaining time."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from rich.console import Console

from zinfer.display import Progress
from zinfer.units import clock

_LATELY: Final = 20  # updates of the progress line
_TRUSTED_SHARE: Final = 0.05  # of a batch: after this part, the measured pace weighs as much as the prediction
_MOST_SHARE: Final = 0.99  # of a batch that takes more passes than predicted


@dataclass(frozen=True)
class Forecast:
    """Prediction for rows that share passes; unknown numbers are 0.

    Attributes:
        text: for display.
        tokens_per_s: new tokens per second.
        seconds: time for all these rows.
        num_passes: passes for all these rows.
    """

    text: str
    tokens_per_s: float = 0.0
    seconds: float = 0.0
    num_passes: float = 0.0


@dataclass(frozen=True)
class Stretch:
    """Prediction for neighbouring rows that the output lacks; unknown numbers are 0.

    Attributes:
        num_rows: those that cannot be used included.
        num_computed: without them.
        seconds, num_new_tokens: of all these rows.
        num_passes: of all these rows, of each rank that takes part in their passes.
    """

    num_rows: int
    num_computed: float
    seconds: float = 0.0
    num_passes: float = 0.0
    num_new_tokens: float = 0.0

    @classmethod
    def of(
        cls, forecasts: Sequence[Forecast], num_rows: int, num_computed: float, times: float = 1.0, num_shares: int = 1
    ) -> "Stretch":
        """Return the prediction of so many times the batches of the forecasts.

        Args:
            num_shares: groups of ranks that compute batches side by side.
        """
        return cls(
            num_rows,
            num_computed,
            times * sum(each.seconds for each in forecasts) / num_shares,
            times * sum(each.num_passes for each in forecasts),
            times * sum(each.seconds * each.tokens_per_s for each in forecasts),
        )


@dataclass(frozen=True)
class JobForecast:
    """Prediction for the rows that the output lacks.

    Attributes:
        text: for display.
        stretches: in the order of the input.
    """

    text: str
    stretches: tuple[Stretch, ...] = ()

    @property
    def num_rows(self) -> int:
        return sum(each.num_rows for each in self.stretches)

    @property
    def tokens_per_s(self) -> float:
        """New tokens per second; 0 if unknown."""
        seconds = self.seconds(self.num_rows)
        return sum(each.num_new_tokens for each in self.stretches) / seconds if seconds else 0.0

    @property
    def row_s(self) -> float:
        """Seconds per computed row; 0 if unknown."""
        num_computed = sum(each.num_computed for each in self.stretches)
        return self.seconds(self.num_rows) / num_computed if num_computed else 0.0

    def batch(self, place: float, num_rows: int) -> tuple[float, float]:
        """Return the predicted seconds and passes of a batch of computed rows, by those around a place."""
        found = 0.0, 0.0
        for each in self.stretches:
            if each.num_computed and place >= 0:
                times = num_rows / each.num_computed
                found = each.seconds * times, each.num_passes * times
            place -= each.num_rows
        return found

    def seconds(self, num_rows: float) -> float:
        """Return the predicted seconds of the first rows; 0 if unknown."""
        return self._sum([each.seconds for each in self.stretches], num_rows)

    def passes(self, num_rows: float) -> float:
        """Return the predicted passes of the first rows; 0 if unknown."""
        return self._sum([each.num_passes for each in self.stretches], num_rows)

    def work(self, num_rows: float) -> float:
        """Return what the first rows take in the best unit that is known: seconds, else passes, else rows."""
        for predicted in (self.seconds, self.passes):
            if predicted(self.num_rows):
                return predicted(num_rows)
        return num_rows

    def _sum(self, amounts: Sequence[float], num_rows: float) -> float:
        found = 0.0
        for each, amount in zip(self.stretches, amounts, strict=True):
            found += amount * min(num_rows / each.num_rows, 1.0)
            num_rows = max(num_rows - each.num_rows, 0.0)
        return found


@dataclass(frozen=True)
class Load:
    """Counters of the passes so far.

    Attributes:
        num_passes: passes begun.
        num_tokens: tokens computed, prompts included.
        num_new_tokens: tokens generated; for an encoder, all tokens.
        num_running: sequences that hold KV-cache pages.
        num_swapped_pages: pages of preempted sequences in host memory or on disk.
        predicted_s: predicted seconds of the passes that have ended; 0 if unknown.
        since_s: seconds since the last one ended.
    """

    num_passes: int = 0
    num_tokens: int = 0
    num_new_tokens: int = 0
    num_running: int = 0
    num_swapped_pages: int = 0
    predicted_s: float = 0.0
    since_s: float = 0.0

    def with_ranks(self, others: Iterable["Load"]) -> "Load":
        """Return the tokens and sequences of all ranks, with the passes of this one."""
        several = [self, *others]
        return replace(
            self,
            num_tokens=sum(each.num_tokens for each in several),
            num_new_tokens=sum(each.num_new_tokens for each in several),
            num_running=sum(each.num_running for each in several),
            num_swapped_pages=sum(each.num_swapped_pages for each in several),
        )


class Meter(Progress):
    """Measures and shows a job's progress.

    Attributes:
        phase: "running", or an earlier phase.
        phase_s: seconds of each phase so far, but for the current one.
        num_finished: rows in the output, including ``num_skipped`` from before this run.
        load: returns the counters of this run's passes.
        forecast: of the rows that this run computes.
    """

    def __init__(self, console: Console | None = None) -> None:
        super().__init__(console)
        self.phase, self.phase_s = "checking", dict[str, float]()
        self.num_rows = self.num_finished = self.num_skipped = 0
        self.load: Callable[[], Load] = Load
        self.forecast = JobForecast("")
        self.started_s = self._phase_since_s = time.monotonic()
        self.running_since_s: float | None = None
        self._lately = deque([(self.started_s, 0)], maxlen=_LATELY)
        self._earlier_rows = self._batch_missing = 0  # rows of this run: in earlier batches, and in the current one
        self._batch_passes, self._batch_s, self._before = 0, 0.0, Load()
        self._first_s: float | None = None  # of the first pass, beyond what was predicted of it

    @property
    def predicted_tokens_per_s(self) -> float:
        """Predicted new tokens per second; 0 if unknown."""
        return self.forecast.tokens_per_s

    @property
    def predicted_row_s(self) -> float:
        """Predicted seconds per row; 0 if unknown."""
        return self.forecast.row_s

    def add_finished(self, num_rows: int) -> None:
        """Count rows that were written to the output."""
        self.num_finished += num_rows

    def begin(self, phase: str) -> None:
        """Enter a phase; the clock of tokens/s starts with the first "running"."""
        now_s = time.monotonic()
        self.phase_s[self.phase] = self.phase_s.get(self.phase, 0.0) + now_s - self._phase_since_s
        self.phase, self._phase_since_s = phase, now_s
        if phase == "running" and self.running_since_s is None:
            self.running_since_s = now_s

    def begin_batch(self, num_missing: int, num_rows: int) -> None:
        """Begin a batch of ``num_rows`` rows, of which the output lacks ``num_missing``."""
        seconds, passes = self.forecast.batch(self._fresh_rows + num_missing / 2, num_rows)
        self._batch_missing, self._batch_passes, self._batch_s = num_missing, round(passes), seconds
        self._before = self.load()

    def end_batch(self) -> None:
        """End the batch: all its rows are computed."""
        self._earlier_rows += self._batch_missing
        self._batch_missing = 0

    @property
    def running_s(self) -> float:
        """Seconds since the first batch began."""
        return 0.0 if self.running_since_s is None else time.monotonic() - self.running_since_s

    @property
    def tokens_per_s(self) -> float:
        """New tokens of this run over `running_s`, including those of unfinished rows."""
        return self.load().num_new_tokens / self.running_s if self.running_s else 0.0

    def tokens_per_s_lately(self) -> float:
        """Return new tokens per second over the last ``_LATELY`` calls."""
        now_s, counted = time.monotonic(), self.load().num_new_tokens
        before_s, before = self._lately[0]
        self._lately.append((now_s, counted))
        return (counted - before) / (now_s - before_s) if now_s > before_s else 0.0

    @property
    def _pass(self) -> int:
        """Number of the current pass in its batch, from 1; 0 between batches."""
        return self.load().num_passes - self._before.num_passes if self._batch_missing else 0

    @property
    def _fresh_rows(self) -> float:
        """Rows done in this run. Counts the current batch by its passes, since its rows end late and together.

        The first passes, which carry the prompts, count by their predicted seconds, if these are known.
        """
        share, predicted_s = 0.0, self.load().predicted_s - self._before.predicted_s
        if self._batch_missing and self._batch_s and predicted_s > 0:
            share = min(predicted_s / self._batch_s, _MOST_SHARE)
        elif self._batch_passes:
            share = min(self._pass / self._batch_passes, _MOST_SHARE)
        return max(self.num_finished - self.num_skipped, self._earlier_rows + self._batch_missing * share)

    @property
    def eta_s(self) -> float | None:
        """Seconds until the last row is done; None if unknown.

        Starts at the prediction; the measured pace weighs more as rows finish. What they took, beside what was
        predicted of them, corrects the prediction of the rest, whose rows may be longer. What the first pass took
        beyond its prediction says nothing of later ones: kernels are loaded or compiled in it.
        """
        load = self.load()
        since_s = load.since_s if load.predicted_s else 0.0
        spent_s, trusted_s = max(self.running_s - since_s, 0.0), _TRUSTED_SHARE * self._batch_s
        if self._first_s is None and load.predicted_s:
            self._first_s = max(spent_s - load.predicted_s, 0.0)
        done = self.forecast.work(self._fresh_rows)
        left = self.forecast.work(self.num_rows - self.num_skipped) - done
        if done + trusted_s:
            pace = (spent_s - (self._first_s or 0.0) + trusted_s) / (done + trusted_s)
            return max(0.0, left * pace - since_s)
        return self.forecast.seconds(self.forecast.num_rows) or None

    def pass_s(self) -> float | None:
        forecast = self.forecast
        passes = forecast.passes(forecast.num_rows) if forecast.stretches else 0.0
        return forecast.seconds(forecast.num_rows) / passes if passes else None

    def share(self) -> float | None:
        return (self.num_skipped + self._fresh_rows) / max(1, self.num_rows) if self.phase == "running" else None

    def line(self) -> str:
        elapsed = f"{clock(time.monotonic() - self.started_s)} elapsed"
        if self.phase != "running":
            return f"zinfer: {self.phase}, {elapsed}"
        speed = f"{self.tokens_per_s_lately():,.1f} tokens/s now, {self.tokens_per_s:,.1f} overall"
        rows = f"zinfer: running, {self.num_finished}/{self.num_rows} rows"
        return ", ".join([rows, *self._pass_words(), speed, elapsed, self._eta_words()])

    def short_line(self, width: int) -> str:
        if self.phase != "running":
            return self.line()
        speed, predicted_s = f"{self.tokens_per_s:,.1f} tokens/s", self.forecast.seconds(self._fresh_rows)
        if predicted_s and self.running_s and self._pass != 1:  # meaningless before the first pass has ended
            speed += f" ({predicted_s / self.running_s:.0%} of predicted)"
        rows = f"{self.num_finished:,}/{self.num_rows:,} rows"
        parts = [rows, speed, self._eta_words(), *self._pass_words()]
        while len(", ".join(parts)) > width and len(parts) > 1:
            parts.pop()
        return ", ".join(parts)

    def _eta_words(self) -> str:
        eta = self.eta_s
        return f"ETA {'unknown' if eta is None else clock(eta)}"

    def _pass_words(self) -> list[str]:
        number, predicted = self._pass, self._batch_passes
        if not number or not predicted:
            return [f"pass {number:,}"] if number else []
        return [f"pass {number:,} {f'of {predicted:,}' if number <= predicted else f'({predicted:,} predicted)'}"]
