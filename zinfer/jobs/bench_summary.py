"""The result of a bench, as a table and as a JSON document."""

from typing import Any, Final

from rich.table import Table

from zinfer.jobs.bench_result import BenchResult
from zinfer.jobs.comparison import Compared
from zinfer.jobs.summary import JobSummary, causes, phases_line, section_table, summary_rows
from zinfer.planning.step_time import LAUNCHING, speed
from zinfer.units import duration, human_bytes

_SUMMED: Final = (
    "bytes_read_disk",
    "loaded_bytes",
    "bytes_to_device",
    "streamed_bytes_per_pass",
    "disk_bytes_per_pass",
    "device_bytes",
    "host_bytes",
)
"""Counters of each rank's stats that add up."""


def bench_table(result: BenchResult) -> Table:
    """Return the table that `zinfer bench` prints."""
    predicted = result.predicted
    start = [
        ("model", f"{result.model}, random weights"),
        ("device", result.device),
        ("held", _held(result)),
        (
            "weights by home",
            ", ".join(f"{human_bytes(size)} {tier}" for tier, size in result.tier_bytes.items() if size),
        ),
        ("read from", f"{result.file}, {human_bytes(result.file_bytes)} with direct I/O: blocks repeat its bytes"),
    ]
    compared = [
        ("predicted", f"{predicted}"),
        ("achieved", f"{duration(result.seconds)} for {result.stats.passes:,} passes, {speed(result.tokens_per_s)}"),
        ("prompts", speed(result.prompt_tokens_per_s)),
        ("busy", ", ".join(f"{_busy_name(name, result)} {share:.1%}" for name, share in result.shares.items())),
        ("time", f"{duration(result.whole_s)}, of which the passes {duration(result.seconds)}"),
        ("where it went", phases_line(result.all_phase_s)),
    ]
    rivals = [(each.rival, _rival(each, result.num_rows)) for each in result.compared]
    done, *_, bound = summary_rows(_as_job(result))  # between them is the speed, compared above
    return section_table("zinfer bench", [[row for row in start if row[1]], compared, rivals, done, bound])


def _busy_name(resource: str, result: BenchResult) -> str:
    return causes(_device(result))["link"] if resource == "link" else resource


def _device(result: BenchResult) -> str:
    return "cpu" if result.device == "cpu" else "cuda"


def _rival(found: Compared, num_rows: int) -> str:
    if found.failure:
        return f"no figures: {found.failure}"
    rows = "" if found.num_done == num_rows else f" over {found.num_done:,} of the rows"
    theirs = f"{speed(found.tokens_per_s)}{rows} after {duration(found.start_s)}, in batches of {found.batch_size}"
    return f"{theirs}; zinfer is {found.ratio:.2f} x as fast"


def _held(result: BenchResult) -> str:
    if not result.context_bytes:
        return ""
    kept = f"{human_bytes(result.context_bytes)} by CUDA's context and others"
    return f"{human_bytes(result.held_bytes)} to enforce the cap; {kept}" if result.held_bytes else kept


def _as_job(result: BenchResult) -> JobSummary:
    return JobSummary(
        num_rows=result.num_rows,
        num_done=result.num_rows,
        num_failed=0,
        num_skipped=0,
        num_prompt_tokens=result.num_prompt_tokens,
        num_output_tokens=result.num_new_tokens,
        wall_s=result.whole_s,
        running_s=result.seconds,
        predicted_s=result.predicted.seconds,
        predicted_passes=result.predicted.num_passes,
        passes_predicted_s=result.predicted.seconds,
        launching_s=result.predicted.seconds if result.predicted.bottleneck == LAUNCHING else 0.0,
        computing_s=result.seconds,
        stats=result.stats,
        notes=(),
        device=_device(result),
        other_ranks=tuple(each.stats for each in result.ranks[1:]),
    )


def bench_document(result: BenchResult) -> dict[str, Any]:
    """Return the result for the JSON line; bytes, seconds, and shares from 0 to 1."""
    predicted, ranks = result.predicted, result.ranks or (result,)
    several = {"ranks": [_rank_document(each) for each in ranks]} if result.ranks else {}
    return {
        "command": "bench",
        "model": result.model,
        "device": result.device,
        "rows": result.num_rows,
        "prompt_tokens": result.num_prompt_tokens,
        "new_tokens": result.num_new_tokens,
        "predicted_s": predicted.seconds,
        "seconds": result.seconds,
        "predicted_tokens_per_s": predicted.tokens_per_s,
        "tokens_per_s": result.tokens_per_s,
        "prompt_tokens_per_s": result.prompt_tokens_per_s,
        "bottleneck": predicted.bottleneck,
        "shares": result.shares,
        "start_s": result.start_s,
        "wall_s": result.whole_s,
        "phase_s": result.all_phase_s,
        "load_s": max(each.stats.load_s for each in ranks),
        "passes": sum(each.stats.passes for each in ranks),
        "bytes_by_home": dict(result.tier_bytes),
        "blocks_by_home": result.stats.blocks_by_home,
        **{name: sum(getattr(each.stats, name) for each in ranks) for name in _SUMMED},
        "stall_s": result.stats.stall_s,
        "random_file_bytes": result.file_bytes,
        "held_bytes": result.held_bytes,
        "context_bytes": result.context_bytes,
        "compared": [vars(each) for each in result.compared],
        **several,
    }


def _rank_document(result: BenchResult) -> dict[str, Any]:
    return {
        "rows": result.num_rows,
        "seconds": result.seconds,
        "tokens_per_s": result.tokens_per_s,
        "shares": result.shares,
        "passes": result.stats.passes,
        "bytes_by_home": dict(result.tier_bytes),
        **{name: getattr(result.stats, name) for name in (*_SUMMED, "gathered_bytes")},
        "random_file_bytes": result.file_bytes,
    }
