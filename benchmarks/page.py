"""Fills docs/benchmarks.md with tables of all figures in benchmarks/results, and the hardware of each.

    python benchmarks/page.py [--check]

The page's text is written by hand; the parts between ``<!-- figures: NAME -->`` and ``<!-- end -->`` are generated
here, a table for each result of the benchmark NAME. ``--check`` writes nothing and exits with 1 if the page is out of
date.
Figures without a label here are left out; a result whose benchmark has no place on the page is an error.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
RESULTS: Final = ROOT / "benchmarks" / "results"
PAGE: Final = ROOT / "docs" / "benchmarks.md"

_PLACE: Final = re.compile(r"(?s)(<!-- (hardware|figures: (\w+)) -->\n).*?(<!-- end -->\n)")
_SETTINGS: Final = [
    "ranks",
    "model",
    "layers",
    "hidden",
    "batch",
    "texts",
    "prompts",
    "prompt",
    "shared",
    "new",
    "prefill",
    "dtype",
]
_JOINED: Final = {
    "to_device_bytes_per_s": "links together",
    "gather_bytes_per_s": "gathers",
    "all_reduce_bytes_per_s": "sums",
}
_CASES: Final = ("cases", "systems", "formats", "host", "rates")

Figures = Mapping[str, Any]
Rows = Sequence[Mapping[str, str]]


def _number(digits: int, unit: str = "") -> Callable[[Any], str]:
    return lambda value: f"{value:,.{digits}f}{unit}"


def _three(unit: str = "") -> Callable[[Any], str]:
    """Three digits, as many as a measurement carries; large numbers whole."""

    def show(value: Any) -> str:
        digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
        return f"{value:,.{digits}f}{unit}"

    return show


def _percent(value: Any) -> str:
    return f"{100 * value:.1f} %"


def _seconds(value: Any) -> str:
    """Seconds of a job: one digit, two where it took less than ten."""
    return f"{value:.1f} s" if value >= 10 else f"{value:.2f} s"


LABELS: Final[dict[str, tuple[str, Callable[[Any], str]]]] = {
    "link_gb_per_s": ("link", _number(1, " GB/s")),
    "disk_gb_per_s": ("disk", _number(2, " GB/s")),
    "pin_gb_per_s": ("touching and registering memory", _number(1, " GB/s")),
    "copy_gb_per_s": ("device copy", _number(0, " GB/s")),
    "read_gb_per_s": ("best reads", _number(2, " GB/s")),
    "write_gb_per_s": ("best writes", _number(2, " GB/s")),
    "sustained_gb_per_s": ("one sequence of reads", _number(2, " GB/s")),
    "seconds": ("job", _seconds),
    "job_s": ("job", _seconds),
    "tokens_per_s": ("new tokens/s", _number(0)),
    "times_zinfer_s": ("over zinfer's time", _number(1, " x")),
    "streamed_over_resident": ("resident over streamed", _number(3)),
    "over_predicted": ("taken over predicted", _number(2)),
    "passes": ("passes", _number(0)),
    "tokens_per_pass": ("tokens a pass", _number(0)),
    "matrix_tflops": ("matrix work", _number(0, " TFLOP/s")),
    "steady_tflops": ("steady matrix work", _number(0, " TFLOP/s")),
    "streamed_gb": ("streamed", _number(1, " GB")),
    "of_disk": ("share of the disk", _percent),
    "link_stall_s": ("waited for the link", _number(2, " s")),
    "rest_ms": ("device idle between passes", _number(2, " ms")),
    "tier": ("weights", str),
    "decode_s": ("decode pass", _number(4, " s")),
    "decode_share": ("share of the ceiling (decode)", _percent),
    "decode_over_predicted": ("decode over predicted", _number(2)),
    "prefill_s": ("prefill pass", _number(4, " s")),
    "prefill_share": ("share of the ceiling (prefill)", _percent),
    "prefill_over_predicted": ("prefill over predicted", _number(2)),
    "pinned_gb": ("pinned memory", _number(2, " GB")),
    "gb_per_s": ("bytes a second", _number(1, " GB/s")),
    "share": ("share of the ceiling", _percent),
    "start_s": ("start", _number(1, " s")),
    "made_s": ("engine made", _number(2, " s")),
    "load_s": ("loading", _number(2, " s")),
    "load_share": ("share of the ceiling (loading)", _percent),
    "first_token_s": ("first token", _number(2, " s")),
    "loaded_gb": ("loaded", _number(2, " GB")),
    "host_decode_s": ("decode pass from host memory", _number(4, " s")),
    "host_decode_share": ("share of the link", _percent),
    "resident_decode_of_fp16": ("resident decode over fp16's", _number(1)),
    "prefill_of_fp16": ("resident prefill over fp16's", _number(2)),
    "hot_path_us_per_block": ("model thread, streaming a block", _number(0, " us")),
    "pass_us_per_block": ("pass over a resident one, a block", _number(0, " us")),
    "eager_ms": ("transformers", _number(1, " ms")),
    "ms": ("zinfer", _number(2, " ms")),
    "times": ("times as fast", _number(1, " x")),
    "of_memory": ("share of a device copy's rate", _percent),
    "llm_ms": ("LLM", _number(2, " ms")),
    "llm_of_memory": ("share of a device copy's rate (LLM)", _percent),
    "streamed_layers": ("layers that stream", str),
    "resident_ms": ("resident", _number(1, " ms")),
    "launched_ms": ("without graphs", _number(1, " ms")),
    "link_ms": ("PCIe alone", _number(2, " ms")),
    "host_ms": ("host's work a pass", _number(1, " ms")),
    "host_ms_p95": ("95th percentile", _number(1, " ms")),
    "us": ("time", _three(" us")),
    "of_copy": ("share of a device copy's rate", _percent),
    "over_bound": ("over the bytes' time", _number(2)),
    "over_fp16": ("times as fast as fp16", _number(1, " x")),
    "over_compiled": ("torch.compile over ours", _number(2, " x")),
    "over_eager": ("torch over ours", _number(1, " x")),
    "over_torch": ("torch's product over ours", _number(2, " x")),
    "over_share": ("over the full product's time, by bytes", _number(2)),
    "of_dense": ("share of the dense rate", _percent),
    "codes_us": ("from codes", _three(" us")),
    "decoded_us": ("dequantized first", _three(" us")),
    "apart_over_packed": ("apart over packed", _number(2, " x")),
    "called_apart_over_packed": ("apart over packed, called", _number(2, " x")),
    "tflop_per_s": ("matrix work", _number(0, " TFLOP/s")),
    "of_flash": ("torch's flash attention over ours", _number(2, " x")),
    "tflops": ("matrix work", _number(0, " TFLOP/s")),
    "over_gathering": ("torch with gathering over ours", _number(2, " x")),
    "over_one": ("over one GPU", _number(2, " x")),
    "link_share": ("share of the links together", _percent),
    "link_share_of_decodes": ("of decode passes alone", _percent),
    "host_over_model": ("host memory over the model", _number(2)),
    "gathered_over_whole": ("pass over one with whole weights", _number(3)),
    "cold_s": ("job, kernels not compiled", _number(1, " s")),
    "process_s": ("process", _number(1, " s")),
    "process_over": ("over reading and passes", _number(2)),
    "computing_s": ("its passes", _number(1, " s")),
    "job_over_predicted": ("passes over predicted", _number(2)),
    "ready_s": ("ready after", _number(1, " s")),
    "pass_gb": ("streamed a pass", _number(2, " GB")),
    "p95_over_link": ("95 % of gaps over the link's time", _number(2)),
    "over_off": ("with guesses over without", _number(2, " x")),
    "over_offline": ("over LLM.generate", _number(3)),
    "first_median_ms": ("first token, median", _number(0, " ms")),
    "first_most_ms": ("first token, 95 % within", _number(0, " ms")),
    "median_ms": ("an answer, median", _number(1, " ms")),
    "most_ms": ("an answer, 99 % within", _number(1, " ms")),
    "times_lower_p95": ("95 % of a token's time, static over served", _number(2)),
    "throughput_over": ("tokens/s over static batches'", _number(2)),
    "bytes_per_s": ("rate", lambda value: f"{value / 1e9:.2f} GB/s"),
}
"""Label and form of each figure, in the order of columns; figures that are not here are left out."""


def fill(page: str, runs: Sequence[tuple[str, Figures]]) -> str:
    """Return the page with the present tables at its places.

    Args:
        runs: names of results, and what they hold.

    Raises:
        ValueError: the page has no place for a result's benchmark.
    """
    kinds = {run["benchmark"] for _, run in runs}
    places = {found[3] for found in _PLACE.finditer(page)}
    if kinds - places:
        raise ValueError(
            f"no place for {', '.join(sorted(kinds - places))}: add <!-- figures: NAME --> and <!-- end -->"
        )

    def tables(found: re.Match[str]) -> str:
        chosen = [(name, run) for name, run in runs if run["benchmark"] == found[3]]
        parts = [_show(name, run) for name, run in chosen] if found[3] else [_table(_cards(run for _, run in runs))]
        return found[1] + "\n" + "\n".join(parts) + "\n" + found[4]

    return _PLACE.sub(tables, page)


def read_runs(results: Path = RESULTS) -> list[tuple[str, Figures]]:
    """Return names and contents of all results, ``peer-jobs`` before ``peer-jobs-example``."""
    paths = sorted(results.glob("*.json"), key=lambda path: path.stem.rpartition("-")[0])
    return [(path.stem, json.loads(path.read_text())) for path in paths]


def _cards(runs: Iterable[Figures]) -> Rows:
    """A row for each machine."""
    names = ("zinfer", "torch", "cuda", "transformers", "python")
    rows = []
    for card in (run["card"] for run in runs):
        row = {
            "GPU": f"{card['gpu']}, {card['gpu_memory_gb']} GB" if "gpu" in card else "none used",
            "host": f"{card['cpu_cores']} cores, {card['host_memory_gb']} GB",
            "software": ", ".join(f"{name} {card[name]}" for name in names if name in card),
        }
        if row not in rows:
            rows.append(row)
    return rows


def _show(name: str, run: Figures) -> str:
    """The settings and the table of one result."""
    told = [f"{name} {value:,}" if isinstance(value := run[name], int) else value for name in _SETTINGS if name in run]
    ceilings = [
        f"{label} {form(run[key])}" for key, (label, form) in LABELS.items() if isinstance(run.get(key), int | float)
    ]
    if joined := run.get("joined"):
        ceilings += [f"{label} {joined[key] / 1e9:,.0f} GB/s" for key, label in _JOINED.items()]
    rivals = [
        f"{rival} {run['card'][rival]}" for rival in ("deepspeed", "flexgen", "accelerate") if rival in run["card"]
    ]
    words = [", ".join(part) for part in (told, ceilings, rivals) if part]
    if run.get("unfinished"):
        words.append("cut off after these cases")
    rows: Rows = [
        {"case": case} | {LABELS[key][0]: LABELS[key][1](figures[key]) for key in LABELS if key in figures}
        for case, figures in _cases(next(run[key] for key in _CASES if key in run))
    ]
    rows = _by_format(rows) if run["benchmark"] == "experts" else rows
    return f"### {name}\n\n{'; '.join(words)}\n\n{_table(rows)}"


def _cases(cases: Any) -> Iterator[tuple[str, Figures]]:
    """Cases by name; one that holds others gives each of them, with both names."""
    if not isinstance(cases, Mapping):
        cases = {
            f"{case['operation']} {case['block_bytes'] >> 10:,} KiB, {case['num_threads']} threads": case
            for case in cases
        }
    for name, case in cases.items():
        inner = {key: value for key, value in case.items() if isinstance(value, Mapping) and "seconds" in value}
        if not inner:
            yield name, case
        for key, value in inner.items():
            ratio = f"{key}_over_resident"
            yield f"{name}, {key.replace('_', ' ')}", {**value, **({ratio: case[ratio]} if ratio in case else {})}


def _by_format(rows: Rows) -> Rows:
    """Experts: a row for each matrix and number of tokens, with a column for each format."""
    found: dict[str, dict[str, str]] = {}
    for row in rows:
        kind, matrix, *rest = row["case"].split()
        if kind == "groups" or kind == "torch":
            continue
        cells = found.setdefault(
            f"{matrix} {' '.join(rest)}", {"experts x rows x columns": f"{matrix} {' '.join(rest)}"}
        )
        cells[f"{kind}: over torch"] = row["torch with gathering over ours"]
        if kind == "full":
            cells["full: share of a copy's rate"] = row["share of a device copy's rate"]
            cells["full: matrix work"] = row["matrix work"]
    return list(found.values())


def _table(rows: Rows) -> str:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [columns, ["---"] * len(columns), *([row.get(name, "") for name in columns] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> int:
    """0: the page is the present one, or has been written; 1: it is not, with ``--check``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args()
    page = PAGE.read_text(encoding="utf-8")
    wanted = fill(page, read_runs())
    if page == wanted:
        return 0
    if args.check:
        print(f"{PAGE}: not the present figures; run python benchmarks/page.py")
        return 1
    PAGE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
