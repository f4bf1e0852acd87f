"""The model of a job: loaded when the first batch needs it, timed while it computes."""

import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import torch

from zinfer.config.without_effect import said_before
from zinfer.errors import JobError
from zinfer.jobs.completer import Answer, Completer
from zinfer.jobs.progress import Meter
from zinfer.jobs.prompts import Prompt
from zinfer.jobs.request import JobRequest, kept
from zinfer.jobs.summary import weights_line
from zinfer.jobs.timeline import Moment, Timeline
from zinfer.jobs.weights import Weights
from zinfer.units import duration


class LoadedModel:
    """A completer that is opened once, and what it did.

    Args:
        device: "cuda" or "cpu", for messages.
        open_completer: loads the model with room for these prompts.

    Attributes:
        completer: None before the first batch.
        computing_s: seconds in passes.
    """

    def __init__(
        self,
        request: JobRequest,
        device: str,
        weights: Weights,
        meter: Meter,
        open_completer: Callable[[Sequence[Prompt]], Completer],
    ) -> None:
        self.completer: Completer | None = None
        self.computing_s = 0.0
        self._output, self._takes_moments = request.output, request.report is not None
        self._device, self._weights, self._meter = device, weights, meter
        self._open = open_completer
        self._timeline: Timeline | None = None
        self._said_cost = False

    def load(self, prompts: Sequence[Prompt]) -> Completer:
        """Return the completer, loaded with room for these prompts if they are the first."""
        if self.completer is None:
            meter = self._meter
            meter.begin("loading")
            with _stopping("loading the model", self._output), said_before():
                completer = self.completer = self._open(prompts)
                self._weights.check_unchanged()
                meter.note(f"weights: {weights_line(completer.stats(), self._device)}")
                forecast = completer.forecast(prompts)
            meter.note(f"predicted: {forecast.text}")
            meter.expect(forecast, len(prompts))
            if self._takes_moments:
                self._timeline = Timeline(completer.stats, completer.load)
        return self.completer

    def complete(
        self, prompts: Sequence[Prompt], missing: Collection[int]
    ) -> Generator[tuple[Prompt, Answer], None, None]:
        """Yield each prompt's answer, as `Completer.complete`.

        Args:
            missing: identities of the prompts whose rows the output lacks.

        Raises:
            JobError: the engine failed; says which rows were under way.
        """
        begin_s, completer = time.monotonic(), self.load(prompts)
        self._say_what_a_kill_costs(len(prompts))
        self._meter.begin_batch(len(missing), len(prompts))
        if num_again := len(prompts) - len(missing):
            self._meter.note(
                f"computing {num_again:,} rows again that are in the output already, beside {len(missing):,} that are "
                "missing: they shared passes, and so every row stays as it would have been"
            )
        rows = f"rows {prompts[0].row.id!r} to {prompts[-1].row.id!r}"
        with _stopping(rows, self._output), closing(completer.complete(prompts, missing)) as completed:
            for each in completed:
                self._weights.read_rest()
                yield each
        self._meter.end_batch()
        self.computing_s += time.monotonic() - begin_s

    def close_timeline(self) -> list[Moment]:
        """End the timeline and return its moments; none where no report is wanted, or nothing was computed."""
        if self._timeline is None:
            return []
        self._timeline.close()
        return self._timeline.moments

    def close(self) -> None:
        """End threads and give memory back."""
        try:
            self.close_timeline()
        finally:
            if self.completer is not None:
                self.completer.close()

    def _say_what_a_kill_costs(self, num_rows: int) -> None:
        """Say once that rows that share passes are computed together or not at all."""
        if not self._said_cost:
            self._said_cost = True
            seconds = self._meter.predicted_row_s * num_rows
            taking = f" ({duration(seconds)})" if seconds else ""
            self._meter.note(f"if stopped, at most {num_rows:,} rows are computed again{taking}; written rows are kept")


@contextmanager
def _stopping(what: str, output: Path) -> Iterator[None]:
    """Turns a failure of the engine into a JobError that says what was under way; the cause stays attached."""
    try:
        yield
    except (RuntimeError, OSError, MemoryError) as error:
        remedy = "run the same command again to go on"
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            remedy = (
                "lower zinfer.max_device_memory or zinfer.max_host_memory in the config, which leaves more for the "
                f"rows, and {remedy}; or begin anew with a smaller --batch-size and --restart"
            )
        kind = type(error).__name__
        raise JobError(f"{what}: {kind}: {error}\n{kept(output)}; {remedy}") from error
