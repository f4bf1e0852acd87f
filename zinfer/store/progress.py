"""Shows how far a store is: a bar on a terminal, otherwise one plain line every 10 s, however long a block takes."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from zinfer.jobs.progress import HEARTBEAT_S, clock
from zinfer.units import human_bytes


@dataclass
class Meter:
    """What is done so far. Written by the threads that do it, read by the display's.

    Attributes:
        console: where notes are said.
        read_bytes: gives the bytes read by this run.
        total_bytes: that this run reads in all.
        num_blocks, num_written: blocks of the store, and those that are finished, by former runs too.
        notes: what was said.
    """

    console: Console | None = None
    read_bytes: Callable[[], int] = int
    total_bytes: int = 0
    num_blocks: int = 0
    num_written: int = 0
    started_s: float = field(default_factory=time.monotonic)
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Say something once, above the display."""
        self.notes.append(text)
        if self.console is not None:
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def start(self, read_bytes: Callable[[], int], total_bytes: int) -> None:
        """Reading begins; the clock of the rate does too."""
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

    def line(self) -> str:
        """The state in words, for people and for logs."""
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


@contextmanager
def _heartbeat(meter: Meter, console: Console, interval_s: float) -> Iterator[None]:
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(interval_s):
            console.print(meter.line(), markup=False, highlight=False, soft_wrap=True)

    # A daemon, so that a process that ends by a signal in an odd place does not wait for the display.
    thread = threading.Thread(target=beat, name="zinfer-heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _bar(meter: Meter) -> Table:
    row = Table.grid(padding=(0, 1))
    total = meter.total_bytes
    row.add_row(ProgressBar(total=max(1, total), completed=meter.done_bytes, width=30, pulse=not total), meter.line())
    return row
