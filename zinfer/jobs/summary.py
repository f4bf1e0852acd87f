"""The summary of a finished job, as a value and as a table."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any, Final

from rich.table import Table

from zinfer.offload.stats import RunStats
from zinfer.units import duration, human_bytes

_LEAST_COMPARED_S: Final = 60.0  # shorter runs are dominated by startup, so they show no factor
_LEAST_WAIT: Final = 0.05  # of the time; below that compute is the bound
_LEAST_SHARE: Final = 0.0005
_DEVICES: Final = {"cuda": "on the GPU", "cpu": "in memory"}
_PHASES: Final = {"checking": "starting", "loading": "reading"}
_LEAST_SAID_S: Final = 0.05


def causes(device: str) -> dict[str, str]:
    """Return what compute waits for, by the names of `RunStats.stall_s`. ``device`` is "cuda" or "cpu"."""
    link = "PCIe" if device == "cuda" else "host memory"
    return {"disk": "the disk", "host": "copies in host memory", "link": link}


@dataclass(frozen=True)
class JobSummary:
    """A finished job: every row of the input is in the output.

    Attributes:
        num_done, num_failed: rows of the whole output; they add up to num_rows.
        num_skipped: rows that were in the output before this run.
        num_prompt_tokens, num_output_tokens: tokens of the rows that this run wrote.
        running_s: seconds from the first batch to the last row; computing_s of them in passes.
        predicted_s, predicted_passes: seconds and number of passes that were predicted before the first one, which is
            what the run shows at its beginning; 0: unknown.
        passes_predicted_s: predicted seconds of the passes that were computed: fewer than predicted where texts end
            early. ``launching_s`` of them Python takes longest, which launches.
        stats: None if this run computed nothing.
        notes: notices shown during the run, for example of a dropped torn line.
        failures: number of rows that failed in this run, by reason.
        device: "cuda" or "cpu".
        predicted_tokens_per_s: new tokens per second predicted for the rows of this run; 0: unknown.
        other_ranks: stats of ranks 1, 2 and so on, if several shared the job; ``stats`` are rank 0's.
        num_in_step: how many ranks make each pass together.
        input_errors: of products whose inputs were rounded to 8 bits, by layer, on rank 0, as `InputErrors.by_layer`.
        phase_s: seconds of the phases: "checking", "planning", "loading", "first pass" and "passes"; of a process also
            "starting" before them and "end" behind.
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
    other_ranks: tuple[RunStats, ...] = ()
    num_in_step: int = 1
    input_errors: Mapping[str, float] = field(default_factory=dict)
    phase_s: Mapping[str, float] = field(default_factory=dict)
    predicted_passes: float = 0.0
    passes_predicted_s: float = 0.0
    launching_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """New tokens per second of `running_s`, which excludes loading the model."""
        return self.num_output_tokens / self.running_s if self.running_s else 0.0

    def of_process(self, starting_s: float, process_s: float) -> "JobSummary":
        """Return the summary with the time of the whole process.

        Args:
            starting_s: from the process's start to the job's.
            process_s: from the process's start until now, when all is closed.
        """
        phase_s = {"starting": starting_s, **self.phase_s}
        phase_s["end"] = max(process_s - sum(phase_s.values()), 0.0)
        return replace(self, wall_s=process_s, phase_s=phase_s)

    @property
    def exit_code(self) -> int:
        """0 if all rows are done, 3 if some failed."""
        return 3 if self.num_failed else 0


def job_document(summary: JobSummary) -> dict[str, Any]:
    """Return the summary for `zinfer run --json`: seconds, bytes and counts, and the counters of each rank."""
    document = {name: value for name, value in vars(summary).items() if name not in ("stats", "other_ranks")}
    stats = [] if summary.stats is None else [summary.stats, *summary.other_ranks]
    ranks = [asdict(each) for each in stats]
    return {"command": "run", **document, "tokens_per_s": summary.tokens_per_s, "ranks": ranks}


def summary_table(summary: JobSummary) -> Table:
    """Return the table that `zinfer run` prints at the end."""
    return section_table("zinfer run", summary_rows(summary))


def section_table(title: str, sections: Iterable[Iterable[tuple[str, str]]]) -> Table:
    """Return a table of names and values, with a line between sections."""
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column("what")
    table.add_column("value", overflow="fold")
    for section in sections:
        for row in section:
            table.add_row(*row)
        table.add_section()
    return table


def summary_rows(summary: JobSummary) -> list[list[tuple[str, str]]]:
    """Return names and values in three sections: rows done, speed, and the bottleneck."""
    reasons = ", ".join(f"{count:,} x {reason}" for reason, count in summary.failures.items())
    rows = f"{summary.num_done:,} done, {summary.num_failed:,} failed{': ' if reasons else ''}{reasons}"
    tokens, skipped = summary.num_output_tokens, summary.num_skipped
    done = {
        "rows": rows + (f"; {skipped:,} rows before this run" if skipped else ""),
        "tokens": summary.num_prompt_tokens
        and f"{summary.num_prompt_tokens:,} in" + (f", {tokens:,} out" if tokens else ""),
        "output": summary.output,
        "rounded inputs": _rounded_inputs(summary),
    }
    running = f", {duration(summary.running_s)} after loading" if summary.running_s else ""
    speed = {
        "speed": tokens and f"{summary.tokens_per_s:,.1f} tokens/s",
        "time": f"{duration(summary.wall_s)}{running}",
        "where it went": phases_line(summary.phase_s),
        "predicted": _predicted(summary),
        "passes": _passes(summary),
    }
    bound = _bound_rows(summary.stats, summary) if summary.stats else {}
    if summary.stats and summary.other_ranks:
        bound |= _rank_rows([summary.stats, *summary.other_ranks], summary)
    sections = [[(name, str(value)) for name, value in section.items() if value] for section in (done, speed, bound)]
    return [section for section in sections if section]


def weights_line(stats: RunStats, device: str) -> str:
    """Describe the placement of the weights and the bytes streamed. ``device`` is "cuda" or "cpu"."""
    streamed = stats.streamed_bytes_per_pass
    return _places(stats, device) + (f"; {human_bytes(streamed)} stream each pass" if streamed else "")


def _places(stats: RunStats, device: str) -> str:
    """Return ``12 blocks in host memory, 3 on the GPU``."""
    places = {"HOST": "in host memory", "DISK": "on disk", "DEVICE": _DEVICES[device]}
    counts = [(stats.blocks_by_home.get(tier, 0), place) for tier, place in places.items()]
    blocks = ", ".join(f"{count:,} {place}" for count, place in counts if count)
    return blocks.replace(" ", " block " if blocks.startswith("1 ") else " blocks ", 1)


def phases_line(phase_s: Mapping[str, float]) -> str:
    """Return ``starting 7.1 s, planning 1.0 s, reading 5.2 s``, without phases of less than a twentieth."""
    said: dict[str, float] = {}
    for phase, seconds in phase_s.items():
        name = _PHASES.get(phase, phase)
        said[name] = said.get(name, 0.0) + seconds
    return ", ".join(f"{name} {duration(seconds)}" for name, seconds in said.items() if seconds >= _LEAST_SAID_S)


def _rounded_inputs(summary: JobSummary) -> str:
    errors = summary.input_errors
    if not errors:
        return ""
    worst = max(errors, key=lambda name: errors[name])
    products = "products of rank 0" if summary.other_ranks else "products"
    return (
        f"{products} are {median(errors.values()):.2%} off at the median, {errors[worst]:.2%} at most ({worst}), each "
        "measured once on real inputs against unrounded ones with the same quantized weights; this is not the error of "
        "the output"
    )


def _passes(summary: JobSummary) -> str:
    ranks = [each for each in (summary.stats, *summary.other_ranks) if each is not None]
    left_out = sum(each.passes_left_out for each in ranks)
    passes = f"{ranks[0].passes:,}" if ranks else ""
    return passes + (f"; {left_out:,} with written rows alone were left out" if left_out else "")


def _predicted(summary: JobSummary) -> str:
    """Return what was predicted of the passes, in the words of the run's beginning, and what they took."""
    predicted_s, computing_s = summary.predicted_s, summary.computing_s
    if not predicted_s or not computing_s:
        return ""
    factor = f" ({computing_s / predicted_s:.2f} x as long)" if computing_s >= _LEAST_COMPARED_S else ""
    expected, made = round(summary.predicted_passes), 0 if summary.stats is None else summary.stats.passes
    passes = f"{expected:,} passes" if expected else "passes"
    number = f" for {made:,}" if expected and made != expected else ""
    return f"{duration(predicted_s)} for {passes}; they took {duration(computing_s)}{number}{factor}"


def _bound_rows(stats: RunStats, summary: JobSummary) -> dict[str, str]:
    shares = {causes(summary.device)["link"]: stats.link_share, "the disk": stats.disk_share}
    moved = {"read from disk": stats.bytes_read_disk, "copied to the GPU": stats.bytes_to_device}
    memory = {"on the GPU": stats.device_bytes, "in host memory": stats.host_bytes}
    if summary.device == "cpu":
        moved, memory = {"read from disk": stats.bytes_read_disk}, {"": stats.device_bytes + stats.host_bytes}
    streamed = stats.streamed_bytes_per_pass
    return {
        "limited by": _bound(stats, summary.device, launches=summary.launching_s > summary.passes_predicted_s / 2),
        "used": ", ".join(
            f"{share:.1%} of {name}" for name, share in shares.items() if share and share >= _LEAST_SHARE
        ),
        "weights": _places(stats, summary.device),
        "streamed": f"{human_bytes(streamed)} each pass" if streamed else "",
        "moved": _amounts(moved),
        "memory": _amounts(memory),
    }


def _rank_rows(ranks: Sequence[RunStats], summary: JobSummary) -> dict[str, str]:
    """Return what the ranks moved, each and together."""

    def amounts(sizes: Sequence[int], what: str) -> str:
        return f"{human_bytes(sum(sizes))} {what} ({', '.join(map(human_bytes, sizes))})" if any(sizes) else ""

    moved = [amounts([each.bytes_read_disk for each in ranks], "read from disk")]
    if summary.device == "cuda":
        moved.append(amounts([each.bytes_to_device for each in ranks], "copied to the GPUs"))
    moved.append(amounts([each.gathered_bytes for each in ranks], "gathered from other ranks"))
    passes = ", ".join(f"{each.passes:,}" for each in ranks)
    together = f", {summary.num_in_step} to each pass" if summary.num_in_step > 1 else ""
    return {"ranks": f"{len(ranks)}{together}: {passes} passes", "of all ranks": "; ".join(filter(None, moved))}


def _bound(stats: RunStats, device: str, *, launches: bool) -> str:
    """Return what compute waited for most, and for how long.

    Args:
        launches: Python's launches take most of the time, by prediction.
    """
    words = causes(device)
    waits = {cause: stats.stall_s.get(cause, 0.0) for cause in words}
    cause = max(waits, key=lambda cause: waits[cause])
    if sum(waits.values()) < _LEAST_WAIT * max(stats.span_s, 1.0):
        return "Python (launching)" if launches else "compute"
    told = ", ".join(f"{duration(seconds)} for {words[each]}" for each, seconds in waits.items() if seconds >= 0.05)
    return f"{words[cause]}: compute waited {told}" if told else words[cause]


def _amounts(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{human_bytes(size)} {what}".rstrip() for what, size in sizes.items() if size)
