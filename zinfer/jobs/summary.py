"""What a finished job did, as a value and as a table."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from rich.table import Table

from zinfer.offload.stats import RunStats
from zinfer.units import clock, human_bytes, name_values

EXIT_OK = 0
EXIT_SOME_FAILED = 3
_LEAST_COMPARED_S: Final = 60.0  # below that starting up decides, and a factor says nothing


@dataclass(frozen=True)
class JobSummary:
    """A job that came to its end: every row of the input is in the output.

    num_done + num_failed == num_rows counts the whole output; num_skipped of them were there before this run. Tokens
    are those of the rows that this run wrote. running_s: from the first batch to the last row; computing_s: of it, in
    passes; predicted_s: what the plan gave those passes. stats is None where this run had nothing to compute. notes:
    what was said on the way, such as a torn line dropped. failures: rows that this run failed, by reason.
    """

    num_rows: int
    num_done: int
    num_failed: int
    num_skipped: int
    num_prompt_tokens: int
    num_output_tokens: int
    wall_s: float
    running_s: float
    predicted_s: float
    computing_s: float
    stats: RunStats | None
    notes: tuple[str, ...]
    output: str = ""
    failures: Mapping[str, int] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        """New tokens over `running_s`, the loading of the model left out."""
        return self.num_output_tokens / self.running_s if self.running_s else 0.0

    @property
    def exit_code(self) -> int:
        """0 all rows done, 3 some rows failed."""
        return EXIT_SOME_FAILED if self.num_failed else EXIT_OK


def summary_table(summary: JobSummary) -> Table:
    """The table that `zinfer run` ends with."""
    table = Table(title="zinfer run", show_header=False, title_justify="left")
    table.add_column("what")
    table.add_column("value", justify="right", overflow="fold")
    for section in summary_rows(summary):
        for row in section:
            table.add_row(*row)
        table.add_section()
    return table


def summary_rows(summary: JobSummary) -> list[list[tuple[str, str]]]:
    """Names and values: of the job, and of what was streamed."""
    rows = f"{summary.num_done:,} done, {_failed(summary)}"
    job = [
        ("rows", f"{rows}; {summary.num_skipped:,} rows before this run" if summary.num_skipped else rows),
        ("tokens in / out", f"{summary.num_prompt_tokens:,} / {summary.num_output_tokens:,}"),
        ("tokens/s", f"{summary.tokens_per_s:,.1f}"),
        ("wall", f"{clock(summary.wall_s)} ({summary.running_s:,.1f} s of it running)"),
    ]
    if summary.computing_s and summary.predicted_s:
        both = f"{summary.predicted_s:,.2f} s / {summary.computing_s:,.2f} s"
        if summary.computing_s >= _LEAST_COMPARED_S:
            both += f" ({summary.computing_s / summary.predicted_s:.2f} x as long)"
        job.append(("predicted / achieved", both))
    if summary.output:
        job.append(("output", summary.output))
    return [job] if summary.stats is None else [job, _stats_rows(summary.stats)]


def _failed(summary: JobSummary) -> str:
    """How many rows failed, and why: those of this run."""
    reasons = ", ".join(f"{count:,} x {reason}" for reason, count in summary.failures.items())
    return f"{summary.num_failed:,} failed: {reasons}" if reasons else f"{summary.num_failed:,} failed"


def _stats_rows(stats: RunStats) -> list[tuple[str, str]]:
    rows = [
        ("passes", f"{stats.passes:,}"),
        ("streamed per pass", human_bytes(stats.streamed_bytes_per_pass)),
        ("bytes_read_disk", f"{stats.bytes_read_disk:,} ({human_bytes(stats.bytes_read_disk)})"),
        ("bytes_to_device", f"{stats.bytes_to_device:,} ({human_bytes(stats.bytes_to_device)})"),
        ("pinned / device memory", f"{human_bytes(stats.pinned_bytes)} / {human_bytes(stats.device_bytes)}"),
        ("blocks by home", name_values(stats.blocks_by_home)),
    ]
    if stats.link_share is not None and stats.disk_share is not None:
        rows.append(("of the ceilings", f"link {stats.link_share:.1%}, disk {stats.disk_share:.1%}"))
    return [*rows, ("stalls", name_values({cause: f"{seconds:.2f} s" for cause, seconds in stats.stall_s.items()}))]
