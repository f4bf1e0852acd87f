"""`zinfer run` by continuous batching: the rows of plain `generate`, and the same bytes however often it is ended."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs_run_support import model, output
from jobs_support import letters_model, letters_tokenizer, prompt_rows, read_rows, write_rows
from llm_support import token_bytes
from plan_support import rates
from rich.console import Console
from transformers import AutoModelForCausalLM

from zinfer.errors import JobError
from zinfer.jobs import JobSummary, UnusableInput, run_job
from zinfer.jobs.output import OutputFile
from zinfer.jobs.request import manifest_path
from zinfer.planning import kv_budget as budget

__all__ = ["model", "output"]  # fixtures
ROWS: list[dict[str, Any]] = [
    *prompt_rows(40),
    {"id": "chat", "messages": [{"role": "user", "content": "hi"}]},
    {"id": "ids", "prompt_token_ids": [7, 8, 9], "max_new_tokens": 5},
    {"id": "twice", "prompt": "abc", "n": 2, "temperature": 2.0, "seed": 3},
    {"id": "scored", "prompt": "abc", "logprobs": 2, "max_tokens": 3},
    {"id": "penalised", "prompt": "abcabc", "repetition_penalty": 3.0, "min_p": 0.1, "temperature": 1.0},
    {"id": "bad", "prompt_token_ids": [7, 100_000]},
    {"id": "worse", "prompt": "a", "min_new_tokens": 99},
]


def run(model: Path, prompts: Path, output: Path, **options: Any) -> JobSummary:
    return run_job(model, prompts, output, **{"batch_size": 16, "max_new_tokens": 8, "device": "cpu", **options})


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "in.jsonl", ROWS)


def test_every_row_is_there_and_greedy_ones_are_transformers_own(model: Path, prompts: Path, output: Path) -> None:
    summary = run(model, prompts, output)
    rows = {row["id"]: row for row in read_rows(output)}
    assert set(rows) == {row["id"] for row in ROWS}
    assert {row_id for row_id, row in rows.items() if "error" in row} == {"bad", "worse"}
    assert "token ids are whole numbers from 0 to 130" in rows["bad"]["error"]
    assert "line 47: min_new_tokens must be at most max_new_tokens, which is 8" in rows["worse"]["error"]
    plain, tokenizer = AutoModelForCausalLM.from_pretrained(model), letters_tokenizer()
    for row in [row for row in ROWS[:40] if "temperature" not in row]:
        ids = torch.tensor([tokenizer(row["prompt"]).input_ids])
        found = plain.generate(ids, max_new_tokens=row["max_new_tokens"], do_sample=False, pad_token_id=1)
        tokens = found[0, ids.shape[1] :].tolist()
        assert rows[row["id"]]["token_ids"] == tokens[: tokens.index(2) + 1 if 2 in tokens else None]
    assert len(rows["twice"]["outputs"]) == 2
    assert rows["twice"]["outputs"][0]["token_ids"] != rows["twice"]["outputs"][1]["token_ids"]
    assert rows["twice"]["num_output_tokens"] == sum(len(each["token_ids"]) for each in rows["twice"]["outputs"])
    assert [len(each["top"]) for each in rows["scored"]["logprobs"]] == [2] * 3
    assert rows["ids"]["num_prompt_tokens"] == 3
    assert (summary.num_done, summary.num_failed) == (len(ROWS) - 2, 2)
    assert summary.predicted_s > 0
    assert summary.computing_s > 0


@pytest.mark.sampled(3)
@pytest.mark.parametrize("num_kept", [0, 1, 17, 30, 46])
def test_a_job_that_was_cut_writes_the_same_bytes(
    model: Path, prompts: Path, output: Path, tmp_path: Path, num_kept: int
) -> None:
    run(model, prompts, output)
    whole = output.read_bytes()
    output.write_bytes(b"".join(whole.splitlines(keepends=True)[:num_kept]))
    assert run(model, prompts, output).num_skipped == num_kept
    assert output.read_bytes() == whole


@pytest.mark.slow
def test_sizes_that_were_chosen_are_kept_for_whoever_goes_on(model: Path, prompts: Path, output: Path) -> None:
    tight = {"zinfer": {"max_sequences": 5}}
    run(model, prompts, output, config=tight)
    whole = output.read_bytes()
    manifest = json.loads(manifest_path(output).read_text())
    assert manifest["sizes"]["max_sequences"] == 5
    assert manifest["settings"]["max_sequences"] == 5
    # As if the machine had chosen fewer tokens a pass when the job began.
    manifest["sizes"]["tokens_per_pass"] = 7
    manifest_path(output).write_text(json.dumps(manifest))
    output.write_bytes(whole.splitlines(keepends=True)[0])
    summary = run(model, prompts, output, config=tight)
    assert summary.num_done == len(ROWS) - 2
    assert summary.stats is not None
    num_tokens = sum(len(row.get("prompt", "")) for row in ROWS)
    assert summary.stats.passes > num_tokens / 7


@pytest.mark.slow
@pytest.mark.parametrize("swaps", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_whether_texts_are_parked_on_the_disk_is_kept_whatever_the_rates_are_now(
    model: Path, prompts: Path, output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swaps: bool
) -> None:
    found = {True: rates(disk_bytes_per_s=1e15, flops_per_s=1e6), False: rates(disk_bytes_per_s=1e-3)}
    monkeypatch.setattr(budget, "_MOST_PARKED_BYTES", 0)
    config = {
        "zero_optimization": {"offload_param": {"nvme_path": str(tmp_path / "parked")}},
        "zinfer": {"kv_page_size": 1, "kv_cache_memory": "30kB"},
    }
    written = []
    for now in (swaps, not swaps):
        monkeypatch.setattr("zinfer.engine.estimator.known_rates", lambda *args, now=now: found[now])
        summary = run(model, prompts, output, config=config)
        assert summary.stats is not None
        written.append(summary.stats.swapped_bytes_written)
        output.write_bytes(output.read_bytes().splitlines(keepends=True)[0])
    assert written[0] == written[1]
    assert (written[0] > 0) == swaps
    assert ("swaps_to_disk" in json.loads(manifest_path(output).read_text())["sizes"]) == swaps


def test_a_model_without_ragged_batches_is_padded_and_says_so(tmp_path: Path, output: Path) -> None:
    folder = letters_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    (folder / "config.json").write_text(json.dumps(config))
    rows = prompt_rows(7)
    summary = run(folder, write_rows(tmp_path / "in.jsonl", rows), output)
    assert any("padded batches through transformers' generate" in note for note in summary.notes)
    assert [row["id"] for row in read_rows(output)] == [row["id"] for row in rows]


@pytest.mark.slow
def test_a_disk_that_is_full_ends_the_job(
    model: Path, prompts: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = OutputFile.append

    def full(self: OutputFile, rows: Any) -> None:
        append(self, rows[:1])
        raise JobError("no room")

    monkeypatch.setattr(OutputFile, "append", full)
    with pytest.raises(JobError, match="no room"):
        run(model, prompts, output)
    monkeypatch.undo()
    assert len(read_rows(output)) == 1
    assert run(model, prompts, output).num_skipped == 1


def test_a_terminal_is_shown_the_end(model: Path, prompts: Path, output: Path) -> None:
    stream = io.StringIO()
    summary = run(model, prompts, output, console=Console(file=stream, force_terminal=True, width=200))
    assert summary.num_done == len(ROWS) - 2


@pytest.mark.slow
def test_a_row_that_the_cache_cannot_hold_is_an_error_row_whenever_it_comes(
    model: Path, tmp_path: Path, output: Path
) -> None:
    rows = [{"id": number, "prompt": "a" * (100 if number in (0, 7) else 3)} for number in range(12)]
    prompts = write_rows(tmp_path / "in.jsonl", rows)
    options = {
        "batch_size": 3,
        "config": {"zinfer": {"kv_page_size": 8, "kv_cache_memory": 8 * token_bytes(model) * 4}},
    }
    assert run(model, prompts, output, **options).num_failed == 2
    whole = output.read_bytes()
    found = {row["id"]: row for row in read_rows(output)}
    assert found[7]["error"].startswith(
        "line 8: 100 prompt tokens and 8 new ones take 14 pages of 8 tokens, but the KV"
    )
    for num_kept in range(12):
        output.write_bytes(b"".join(whole.splitlines(keepends=True)[:num_kept]))
        run(model, prompts, output, **options)
        assert output.read_bytes() == whole
    alone = write_rows(tmp_path / "alone.jsonl", [rows[0]])
    assert run(model, alone, tmp_path / "alone.out", **options).num_failed == 1


@pytest.mark.parametrize("option", ["report", "trace"])
@pytest.mark.parametrize("target", ["in.jsonl", "out.jsonl", "out.jsonl.manifest.json", "no/folder.html"])
def test_no_report_or_trace_lands_on_the_jobs_own_files(
    model: Path, prompts: Path, output: Path, option: str, target: str
) -> None:
    before = prompts.read_bytes()
    with pytest.raises(UnusableInput, match=f"give (another --{option}|a --{option} in a folder that exists)"):
        run(model, prompts, output, **{option: output.parent / target})
    assert prompts.read_bytes() == before
    assert not output.exists()


def test_a_report_that_cannot_be_written_is_told_when_all_rows_are_there(
    model: Path, prompts: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("zinfer.jobs.job_run.write_report", full)
    with pytest.raises(JobError, match=r"report .*page.html cannot be written: No space left .* All rows are in"):
        run(model, prompts, output, report=output.parent / "page.html")
    assert len(read_rows(output)) == len(ROWS)
