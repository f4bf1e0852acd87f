"""What `zinfer quantize` did, as a value and as a table."""

from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from zinfer.units import duration, human_bytes


@dataclass(frozen=True)
class StoreSummary:
    """A store that is finished.

    Attributes:
        output: its folder.
        num_blocks: in it, ``num_skipped`` of which were there before this run: all of them where it had nothing to do.
        source_bytes: of the source's weights.
        packed_bytes: of the store's.
        read_bytes: read from the disk by this run.
        wall_s: seconds of this run, from the first read to the last file.
    """

    output: Path
    num_blocks: int
    num_skipped: int
    source_bytes: int
    packed_bytes: int
    read_bytes: int
    wall_s: float

    @property
    def read_bytes_per_s(self) -> float:
        return self.read_bytes / self.wall_s if self.wall_s else 0.0


def summary_table(summary: StoreSummary) -> Table:
    """The table that `zinfer quantize` ends with."""
    table = Table(title="zinfer quantize", show_header=False, title_justify="left")
    table.add_column("what")
    table.add_column("value", justify="right", overflow="fold")
    blocks = f"{summary.num_blocks:,}"
    table.add_row(
        "blocks", f"{blocks}, {summary.num_skipped:,} of them before this run" if summary.num_skipped else blocks
    )
    table.add_row("source", f"{summary.source_bytes:,} bytes ({human_bytes(summary.source_bytes)})")
    table.add_row("packed", f"{summary.packed_bytes:,} bytes ({human_bytes(summary.packed_bytes)})")
    table.add_row("ratio", f"{summary.source_bytes / summary.packed_bytes:.2f} x smaller")
    table.add_row("wall", duration(summary.wall_s))
    table.add_row("read", f"{human_bytes(summary.read_bytes)}, {summary.read_bytes_per_s / 1e9:,.2f} GB/s")
    return table
