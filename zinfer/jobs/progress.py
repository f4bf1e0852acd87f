"""Shows that a job is alive: a bar on a terminal, otherwise one plain line every 10 s, also while one batch takes long.

A thread of its own writes; the job only sets numbers on the `Meter`, so that nothing waits for the display.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

HEARTBEAT_S = 10.0


@dataclass
class Meter:
    """What a job has done so far. Written by the job's thread, read by the display's.

    num_finished counts rows in the output, `num_skipped` of which were there before this run.
    batch_rows and batch_share: rows of the batch under way, and how much of its longest row is generated.
    """

    console: Console | None = None
    phase: str = "checking"
    num_rows: int = 0
    num_finished: int = 0
    num_skipped: int = 0
    num_tokens: int = 0
    batch_rows: int = 0
    batch_share: float = 0.0
    started_s: float = field(default_factory=time.monotonic)
    running_since_s: float | None = None
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Says something once, above the display, and keeps it for the summary."""
        self.notes.append(text)
        if self.console is not None:
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)

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

    def line(self) -> str:
        """The state in words, for people and for logs."""
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


@contextmanager
def display(console: Console | None, interval_s: float = HEARTBEAT_S) -> Iterator[Meter]:
    """A meter that is shown on the console until the block ends; shown nowhere if there is no console."""
    meter = Meter(console)
    if console is None:
        yield meter
    elif console.is_terminal:
        with Live(get_renderable=lambda: _bar(meter), console=console, refresh_per_second=4, transient=True):
            yield meter
    else:
        with _heartbeat(meter, console, interval_s):
            yield meter


def clock(seconds: float) -> str:
    """Seconds as h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


@contextmanager
def _heartbeat(meter: Meter, console: Console, interval_s: float) -> Iterator[None]:
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(interval_s):
            console.print(meter.line(), markup=False, highlight=False, soft_wrap=True)

    # A daemon, so that a job that ends by a signal in an odd place does not wait for the display.
    thread = threading.Thread(target=beat, name="zinfer-heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _bar(meter: Meter) -> Table:
    row = Table.grid(padding=(0, 1))
    finished = meter.num_finished + meter.batch_rows * meter.batch_share
    row.add_row(
        ProgressBar(total=max(1, meter.num_rows), completed=finished, width=30, pulse=meter.phase != "running"),
        meter.line(),
    )
    return row
