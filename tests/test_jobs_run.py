"""The batch job in one process: what it writes, and that it goes on where it stopped."""

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import tiny_checkpoint
from jobs_run_support import FailingEngine, failing, finish, job, model, never_made, output, prompts, whole
from jobs_support import ResidentEngine, letters_model, read_rows, write_rows
from openai_support import run, text

from zinfer.errors import CheckpointError, JobError
from zinfer.jobs import UnusableInput
from zinfer.jobs.request import manifest_path
from zinfer.nvme.reader import DiskReadError
from zinfer.offload.stats import RunStats

__all__ = ["model", "output", "prompts", "whole"]  # fixtures


def test_every_row_is_done_once_and_in_order(model: Path, prompts: Path, output: Path) -> None:
    summary = job(model, prompts, output)
    rows = read_rows(output)
    assert [row["id"] for row in rows] == [f"row-{number}" for number in range(22)]
    sizes = ["num_prompt_tokens", "num_output_tokens"]
    assert list(rows[0]) == ["id", "text", "token_ids", *sizes, "finish_reason", "stop_reason"]
    assert [row["num_prompt_tokens"] for row in rows] == [1 + number % 17 for number in range(22)]
    assert all(row["num_output_tokens"] == len(row["token_ids"]) <= 4 + number % 9 for number, row in enumerate(rows))
    assert (summary.num_rows, summary.num_done, summary.num_failed, summary.num_skipped) == (22, 22, 0, 0)
    assert summary.num_output_tokens == sum(row["num_output_tokens"] for row in rows)
    assert summary.stats == RunStats(passes=6)
    assert summary.exit_code == 0
    assert len({token for row in rows for token in row["token_ids"]}) >= 6


def test_bad_lines_become_error_rows_and_the_job_goes_on(model: Path, tmp_path: Path, output: Path) -> None:
    lines: list[dict[str, Any] | str | bytes] = [
        {"id": "good", "prompt": "abc"},
        "{broken",
        {"id": "typo", "prompt": "abc", "temperture": 1},
        b'{"prompt": "\xff"}',
        {"id": "long", "prompt": "a" * 127, "max_new_tokens": 2},
        {"id": "chat", "messages": [{"role": "user", "content": "hi"}]},
        {"id": "tool", "messages": [{"role": "tool", "content": "hi"}]},
    ]
    summary = job(model, write_rows(tmp_path / "in.jsonl", lines), output)
    rows = {row["id"]: row for row in read_rows(output)}
    assert list(rows) == [2, "typo", 4, "long", "tool", "good", "chat"]
    assert [row_id for row_id, row in rows.items() if "error" not in row] == ["good", "chat"]
    assert rows[2]["error"].startswith("line 2: not JSON")
    assert "line 3: unknown field 'temperture'; did you mean 'temperature'?" in rows["typo"]["error"]
    assert "line 4: not UTF-8" in rows[4]["error"]
    assert "127 tokens and 2 new ones are more than 128" in rows["long"]["error"]
    assert rows["chat"]["num_prompt_tokens"] == len("user:hi;reply:")
    assert (summary.num_done, summary.num_failed, summary.exit_code) == (2, 5, 3)


def test_a_finished_job_needs_no_engine(model: Path, prompts: Path, output: Path, whole: bytes) -> None:
    job(model, prompts, output)
    summary = job(model, prompts, output, engine_factory=never_made)
    assert (summary.num_done, summary.num_skipped, summary.num_output_tokens) == (22, 22, 0)
    assert output.read_bytes() == whole


def test_error_rows_alone_need_no_engine(model: Path, tmp_path: Path, output: Path) -> None:
    path = write_rows(tmp_path / "in.jsonl", [{"prompt": "x" * 200}, *["{"] * 2099])
    assert job(model, path, output, engine_factory=never_made).num_failed == 2100
    assert [row["id"] for row in read_rows(output)] == list(range(1, 2101))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kept_bytes", [0, 1, 700, 1500, 2600, -2, -1])
def test_a_cut_output_is_completed_to_the_same_bytes(
    model: Path, prompts: Path, output: Path, whole: bytes, kept_bytes: int
) -> None:
    with pytest.raises(JobError):
        job(model, prompts, output, engine_factory=failing(RuntimeError("boom")))
    output.write_bytes(whole[:kept_bytes])
    summary = job(model, prompts, output)
    assert output.read_bytes() == whole
    assert summary.num_skipped == whole[:kept_bytes].count(b"\n")
    is_torn = kept_bytes != 0 and not whole[:kept_bytes].endswith(b"\n")
    assert any("dropped a torn last line" in note for note in summary.notes) == is_torn


def test_a_chat_templates_now_is_when_the_job_began(tmp_path: Path, output: Path) -> None:
    model = letters_model(
        tmp_path / "model", chat_template="{{ strftime_now('%d %H:%M:%S') }}{{ messages[0].content }}"
    )
    rows = [{"id": number, "messages": [{"role": "user", "content": "hi"}]} for number in range(2)]
    prompts = write_rows(tmp_path / "in.jsonl", rows)
    job(model, prompts, output, batch_size=1)
    whole = output.read_bytes()
    manifest = json.loads(manifest_path(output).read_text())
    output.write_bytes(whole.splitlines(keepends=True)[0])
    time.sleep(1.1)
    assert job(model, prompts, output, batch_size=1).num_done == 2
    assert output.read_bytes() == whole
    manifest_path(output).write_text(json.dumps({**manifest, "began": "2001-02-03T04:05:06"}))
    output.write_bytes(b"")
    job(model, prompts, output, batch_size=1)
    assert output.read_bytes() != whole


def test_rows_missing_in_the_middle_get_the_same_bytes(model: Path, prompts: Path, output: Path, whole: bytes) -> None:
    finish(model, prompts, output)
    lines = whole.splitlines(keepends=True)
    output.write_bytes(b"".join(lines[:5] + lines[7:13]))
    job(model, prompts, output)
    assert sorted(output.read_bytes().splitlines(keepends=True)) == sorted(lines)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RuntimeError("boom"), "rows 'row-8' to 'row-11': RuntimeError: boom"),
        (torch.OutOfMemoryError("CUDA out of memory"), "lower zinfer.max_weight_memory or zinfer.max_host_memory"),
        (MemoryError(), "begin anew with a smaller --batch-size and --restart"),
        (
            DiskReadError(5, "Input/output error", Path("/m/x.safetensors"), 4096),
            "/m/x.safetensors: reading at byte 4096",
        ),
    ],
)
def test_a_failing_engine_ends_the_job_and_keeps_the_rows(
    model: Path, prompts: Path, output: Path, whole: bytes, error: Exception, message: str
) -> None:
    with pytest.raises(JobError, match=re.escape(message)) as caught:
        job(model, prompts, output, engine_factory=failing(error))
    assert caught.value.__cause__ is error
    assert "run the same command again to go on" in str(caught.value)
    assert len(read_rows(output)) == 8
    assert job(model, prompts, output).num_skipped == 8
    assert output.read_bytes() == whole


def test_an_engine_that_cannot_be_made_leaves_nothing(model: Path, prompts: Path, output: Path) -> None:
    def broken(*_args: object, **_options: object) -> ResidentEngine:
        raise CheckpointError("layer 3 is missing")

    with pytest.raises(CheckpointError, match="layer 3 is missing"):
        job(model, prompts, output, engine_factory=broken)
    assert not output.exists()
    assert not manifest_path(output).exists()


def test_no_rows_are_kept_where_the_model_fails_to_load(model: Path, prompts: Path, output: Path, whole: bytes) -> None:
    def broken(*_args: object, **_options: object) -> ResidentEngine:
        raise torch.OutOfMemoryError("too large")

    with pytest.raises(JobError, match="loading the model: OutOfMemoryError: too large\nNo row was written; lower"):
        job(model, prompts, output, engine_factory=broken)
    assert not output.exists()
    finish(model, prompts, output)
    output.write_bytes(whole[:900])
    with pytest.raises(JobError, match=rf"The rows in {output} are kept; lower"):
        job(model, prompts, output, engine_factory=broken)
    assert whole.startswith(output.read_bytes())


def test_the_engine_is_always_destroyed(model: Path, prompts: Path, output: Path) -> None:
    made: list[ResidentEngine] = []

    def factory(*args: Any, **options: Any) -> ResidentEngine:
        made.append(FailingEngine(*args, **options))
        return made[-1]

    with pytest.raises(JobError):
        job(model, prompts, output, engine_factory=factory)
    assert [engine.is_destroyed for engine in made] == [True]


def test_keys_without_effect_are_said_once(model: Path, prompts: Path, output: Path) -> None:
    notes = job(model, prompts, output, config={"train_batch_size": 4}).notes
    assert [note for note in notes if "train_batch_size" in note] == [
        note for note in notes if "without effect" in note
    ]
    assert len([note for note in notes if "without effect: train_batch_size (" in note]) == 1


@pytest.mark.parametrize("options", [{}, {"engine_factory": ResidentEngine}])
def test_rows_of_token_ids_need_no_tokenizer(tmp_path: Path, output: Path, options: dict[str, Any]) -> None:
    model = tiny_checkpoint("llama", tmp_path / "model", num_layers=2)
    given: list[dict[str, Any]] = [{"prompt_token_ids": [5, 6]}, {"prompt": "a"}]
    given += [{"prompt_token_ids": [5, 6], "stop": "x"}, text("openai", prompt=[5, 6], temperature=0)]
    prompts = write_rows(tmp_path / "in.jsonl", given)
    summary = run(model, prompts, output, **options)
    assert (summary.num_done, summary.num_failed) == (2, 2)
    rows = {row.get("custom_id", row["id"]): row for row in read_rows(output)}
    assert len(rows[1]["token_ids"]) == rows["openai"]["response"]["body"]["usage"]["completion_tokens"] == 8
    assert rows[2]["error"].startswith("line 2: the model's folder has no tokenizer; put the model's tokenizer files")
    assert rows[3]["error"] == "line 3: stop strings need a tokenizer; give stop_token_ids instead"


def test_rows_of_text_alone_are_unusable_without_a_tokenizer(tmp_path: Path, output: Path) -> None:
    model = tiny_checkpoint("llama", tmp_path / "model", num_layers=2)
    prompts = write_rows(tmp_path / "in.jsonl", [{"prompt": "a"}, {"messages": [{"role": "user", "content": "a"}]}])
    with pytest.raises(UnusableInput, match="has no tokenizer; put the model's tokenizer files into it, or give"):
        run(model, prompts, output)
    assert not output.exists()
