"""Rows of OpenAI batch files, and jobs of them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from jobs_support import padded_by, read_rows, write_rows

from zinfer.jobs import JobSummary, run_job

HI = [{"role": "user", "content": "hi"}]


def asked(custom_id: str, url: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": f"/v1/{url}", "body": body}


def chat(custom_id: str, **body: Any) -> dict[str, Any]:
    return asked(custom_id, "chat/completions", **{"messages": HI, **body})


def text(custom_id: str, **body: Any) -> dict[str, Any]:
    return asked(custom_id, "completions", **{"prompt": "abc", **body})


def run(
    model: Path, prompts: Path, output: Path, engine_factory: Callable[..., Any] | None = None, **options: Any
) -> JobSummary:
    with padded_by(engine_factory):
        return run_job(model, prompts, output, **{"batch_size": 16, "max_new_tokens": 8, "device": "cpu", **options})


def rows_of(model: Path, folder: Path, rows: list[dict[str, Any]], **options: Any) -> dict[str, dict[str, Any]]:
    """What a job makes of the rows, by their ids."""
    output = folder / "out.jsonl"
    run(model, write_rows(folder / "in.jsonl", rows), output, **options)
    return {row.get("custom_id", row["id"]): row for row in read_rows(output)}
