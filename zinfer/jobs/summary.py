"""What a finished job did, as a value and as a table."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from rich.table import Table

from zinfer.offload.stats import RunStats
from zinfer.units import duration, human_bytes

EXIT_OK = 0
EXIT_SOME_FAILED = 3
_LEAST_COMPARED_S: Final = 60.0  # below that starting up decides, and a factor says nothing
_LEAST_WAIT: Final = 0.05  # of the time; below that compute is the bound
_LEAST_SHARE: Final = 0.0005
_DEVICES: Final = {"cuda": "on the GPU", "cpu": "in memory"}
CAUSES: Final = {"disk": "the disk", "host": "copies in host memory", "link": "PCIe"}


@dataclass(frozen=True)
class JobSummary:
    """A job that came to its end: every row of the input is in the output.

    num_done + num_failed == num_rows counts the whole output; num_skipped of them were there before this run. Tokens
    are those of the rows that this run wrote. running_s: from the first batch to the last row; computing_s: of it, in
    passes; predicted_s: what the plan gave those passes. stats is None where this run had nothing to compute. notes:
    what was said on the way, such as a torn line dropped. failures: rows that this run failed, by reason. device:
    "cuda" or "cpu". predicted_tokens_per_s: new ones, of the first rows that share passes; 0: not known.
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
    device: str = "cuda"
    predicted_tokens_per_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """New tokens over `running_s`, the loading of the model left out."""
        return self.num_output_tokens / self.running_s if self.running_s else 0.0

    @property
    def exit_code(self) -> int:
        """0 all rows done, 3 some rows failed."""
        return EXIT_SOME_FAILED if self.num_failed else EXIT_OK


def summary_table(summary: JobSummary) -> Table:
    """Return the table that `zinfer run` ends with."""
    table = Table(title="zinfer run", show_header=False, title_justify="left")
    table.add_column("what")
    table.add_column("value", overflow="fold")
    for section in summary_rows(summary):
        for row in section:
            table.add_row(*row)
        table.add_section()
    return table


def summary_rows(summary: JobSummary) -> list[list[tuple[str, str]]]:
    """Return names and values of what was done, how fast that was, and what bounded it."""
    rows = f"{summary.num_done:,} done, {_failed(summary)}"
    done = [("rows", f"{rows}; {summary.num_skipped:,} rows before this run" if summary.num_skipped else rows)]
    if summary.num_prompt_tokens:
        out = f", {summary.num_output_tokens:,} out" if summary.num_output_tokens else ""
        done.append(("tokens", f"{summary.num_prompt_tokens:,} in{out}"))
    if summary.output:
        done.append(("output", summary.output))
    sections = [done, _speed_rows(summary)]
    return sections if summary.stats is None else [*sections, _bound_rows(summary.stats, summary.device)]


def weights_line(stats: RunStats, device: str) -> str:
    """Return where the weights are, and what streams. ``device`` is "cuda" or "cpu"."""
    streamed = stats.streamed_bytes_per_pass
    return _places(stats, device) + (f"; {human_bytes(streamed)} stream each pass" if streamed else "")


def _places(stats: RunStats, device: str) -> str:
    """``12 blocks in host memory, 3 on the GPU``."""
    places = {"HOST": "in host memory", "DISK": "on disk", "DEVICE": _DEVICES[device]}
    counts = [(stats.blocks_by_home.get(tier, 0), place) for tier, place in places.items()]
    blocks = ", ".join(f"{count:,} {place}" for count, place in counts if count)
    return blocks.replace(" ", " block " if blocks.startswith("1 ") else " blocks ", 1)


def _failed(summary: JobSummary) -> str:
    """How many rows failed, and why: those of this run."""
    reasons = ", ".join(f"{count:,} x {reason}" for reason, count in summary.failures.items())
    return f"{summary.num_failed:,} failed: {reasons}" if reasons else f"{summary.num_failed:,} failed"


def _speed_rows(summary: JobSummary) -> list[tuple[str, str]]:
    rows = []
    if summary.num_output_tokens:
        rows.append(("speed", f"{summary.tokens_per_s:,.1f} tokens/s"))
    running = f", {duration(summary.running_s)} after loading" if summary.running_s else ""
    rows.append(("time", f"{duration(summary.wall_s)}{running}"))
    if summary.computing_s and summary.predicted_s:
        both = f"{duration(summary.predicted_s)} for passes that took {duration(summary.computing_s)}"
        if summary.computing_s >= _LEAST_COMPARED_S:
            both += f" ({summary.computing_s / summary.predicted_s:.2f} x as long)"
        rows.append(("prediction", both))
    if summary.stats is not None:
        rows.append(("passes", f"{summary.stats.passes:,}"))
    return rows


def _bound_rows(stats: RunStats, device: str) -> list[tuple[str, str]]:
    rows = [("limited by", _bound(stats))]
    shares = {"PCIe": stats.link_share, "the disk": stats.disk_share}
    if used := [f"{share:.1%} of {name}" for name, share in shares.items() if share and share >= _LEAST_SHARE]:
        rows.append(("used", ", ".join(used)))
    if stats.blocks_by_home:
        rows.append(("weights", _places(stats, device)))
    if stats.streamed_bytes_per_pass:
        rows.append(("streamed", f"{human_bytes(stats.streamed_bytes_per_pass)} each pass"))
    moved = {"read from disk": stats.bytes_read_disk, "copied to the GPU": stats.bytes_to_device}
    memory = {"on the GPU": stats.device_bytes, "in host memory": stats.host_bytes}
    if device == "cpu":
        moved, memory = {"read from disk": stats.bytes_read_disk}, {"": stats.device_bytes + stats.host_bytes}
    sizes = {"moved": _amounts(moved), "memory": _amounts(memory)}
    return [*rows, *((name, amounts) for name, amounts in sizes.items() if amounts)]


def _bound(stats: RunStats) -> str:
    """What computing waited for most, and for how long."""
    waits = {cause: stats.stall_s.get(cause, 0.0) for cause in CAUSES}
    cause = max(waits, key=lambda cause: waits[cause])
    if sum(waits.values()) < _LEAST_WAIT * max(stats.span_s, 1.0):
        return "compute"
    told = ", ".join(f"{duration(seconds)} for {CAUSES[each]}" for each, seconds in waits.items() if seconds >= 0.05)
    return f"{CAUSES[cause]}: compute waited {told}" if told else CAUSES[cause]


def _amounts(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{human_bytes(size)} {what}".rstrip() for what, size in sizes.items() if size)
