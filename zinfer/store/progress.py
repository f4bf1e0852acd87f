"""The progress display of a store being written, and its final table."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from zinfer.display import Progress
from zinfer.units import clock, duration, human_bytes


class Meter(Progress):
    """The progress of a store.

    Attributes:
        read_bytes: returns the bytes read by this run; margins of aligned reads may exceed the total a little.
        total_bytes: bytes that this run reads in all.
        num_blocks, num_written: blocks of the store, and the finished ones, including those of former runs.
    """

    def __init__(self, console: Console | None = None) -> None:
        super().__init__(console)
        self.read_bytes: Callable[[], int] = int
        self.total_bytes = 0
        self.num_blocks = 0
        self.num_written = 0
        self.started_s = time.monotonic()

    def start(self, read_bytes: Callable[[], int], total_bytes: int) -> None:
        """Start the clock of the rate."""
        self.started_s = time.monotonic()
        self.read_bytes, self.total_bytes = read_bytes, total_bytes

    def share(self) -> float | None:
        return min(1.0, self.read_bytes() / self.total_bytes) if self.total_bytes else None

    def line(self) -> str:
        elapsed_s = time.monotonic() - self.started_s
        if not self.total_bytes:
            return f"zinfer: checking, {clock(elapsed_s)} elapsed"
        done = min(self.read_bytes(), self.total_bytes)
        eta = clock((self.total_bytes - done) * elapsed_s / done) if done else "unknown"
        return (
            f"zinfer: {self.num_written}/{self.num_blocks} blocks, "
            f"{human_bytes(done)} of {human_bytes(self.total_bytes)} read, "
            f"{human_bytes(round(done / max(elapsed_s, 1e-3)))}/s, {clock(elapsed_s)} elapsed, ETA {eta}"
        )


@dataclass(frozen=True)
class StoreSummary:
    """A finished store.

    Attributes:
        output: its folder.
        num_blocks: blocks in it, of which ``num_skipped`` existed before this run.
        source_bytes: size of the source's weights.
        packed_bytes: size of the store's weights.
        read_bytes: read from the disk by this run.
        wall_s: seconds of this run, from the first read to the last file.
    """

    output: Path
    num_blocks: int
    num_skipped: int
    source_bytes: int
    packed_bytes: int
    read_bytes: int = 0
    wall_s: float = 0.0


def summary_table(summary: StoreSummary) -> Table:
    """Return the final table of `zinfer quantize`."""
    table = Table(title="zinfer quantize", show_header=False, title_justify="left")
    table.add_column("what")
    table.add_column("value", justify="right", overflow="fold")
    former = f", {summary.num_skipped:,} of them before this run" if summary.num_skipped else ""
    rate = summary.read_bytes / summary.wall_s if summary.wall_s else 0.0
    table.add_row("blocks", f"{summary.num_blocks:,}{former}")
    table.add_row("source", f"{summary.source_bytes:,} bytes ({human_bytes(summary.source_bytes)})")
    table.add_row("packed", f"{summary.packed_bytes:,} bytes ({human_bytes(summary.packed_bytes)})")
    table.add_row("ratio", f"{summary.source_bytes / summary.packed_bytes:.2f} x smaller")
    table.add_row("wall", duration(summary.wall_s))
    table.add_row("read", f"{human_bytes(summary.read_bytes)}, {rate / 1e9:,.2f} GB/s")
    return table
