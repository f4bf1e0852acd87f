"""A job with rounded inputs tells the errors of its products; its rows do not depend on the measurement."""

import io
import json
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from jobs_run_support import model, output
from jobs_support import padded_by, prompt_rows, write_rows
from rich.console import Console

from zinfer import InferenceEngine
from zinfer.engine.input_errors import InputErrors
from zinfer.jobs import JobSummary, run_job
from zinfer.jobs.report import write_report
from zinfer.jobs.summary import job_document, summary_table
from zinfer.offload.stats import RunStats

__all__ = ["model", "output"]  # fixtures
INT8: dict[str, object] = {"bits": 8, "activations": True}
SUMMARY = JobSummary(9, 9, 0, 0, 50, 60, 75.0, 30.0, 20.0, 25.0, None, ())


def said(summary: JobSummary) -> str:
    stream = io.StringIO()
    Console(file=stream, width=400).print(summary_table(summary))
    return next((line for line in stream.getvalue().splitlines() if "rounded inputs" in line), "")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("way", ["batched", "padded", "embed"])
def test_a_job_tells_the_errors_and_its_rows_do_not_show_them(
    way: str, model: Path, output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = write_rows(tmp_path / "in.jsonl", prompt_rows(20))
    if way == "embed":
        prompts = write_rows(prompts, [{"id": row["id"], "prompt": row["prompt"]} for row in prompt_rows(20)])

    def run(section: dict[str, object] | None) -> tuple[JobSummary, bytes]:
        config = {} if section is None else {"zinfer": {"quantization": section}}
        options: dict[str, Any] = {"task": "embed"} if way == "embed" else {"max_new_tokens": 6}
        with padded_by(InferenceEngine if way == "padded" else None):
            found = run_job(model, prompts, output, config=config, device="cpu", restart=True, **options)
        return found, output.read_bytes()

    summary, rows = run(INT8)
    errors = summary.input_errors
    assert len(errors) == 14
    worst = max(errors, key=lambda name: errors[name])
    assert (
        f"products are {median(errors.values()):.2%} off at the median, {errors[worst]:.2%} at most ({worst})"
        in said(summary)
    )
    assert json.loads(json.dumps(job_document(summary)))["input_errors"] == errors
    write_report(tmp_path / "page.html", summary, [])
    assert (tmp_path / "page.html").read_text().count("<td>rounded inputs<td>products are ") == 1

    monkeypatch.setattr(InputErrors, "_measure", lambda *args: None)
    unmeasured, same_rows = run(INT8)
    assert unmeasured.input_errors == {}
    assert same_rows == rows
    monkeypatch.undo()
    for section in (None, {"bits": 8}):
        plain, _ = run(section)
        assert plain.input_errors == {}
        assert said(plain) == ""


def test_ranks_show_the_products_of_the_first() -> None:
    summary = replace(SUMMARY, input_errors={"a": 0.008, "b": 0.021}, other_ranks=(RunStats(),))
    assert "products of rank 0 are 1.45% off at the median, 2.10% at most (b)" in said(summary)
