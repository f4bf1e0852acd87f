"""Jobs that go on: what becomes of rows that are written, and how large batches are for it."""

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import random_prompts, tiny_mixtral
from jobs_run_support import model, output
from jobs_support import letters_tokenizer, read_rows, write_rows
from test_jobs_batched import ROWS, prompts, run

from zinfer.batching.llm import LLM
from zinfer.jobs.request import manifest_path

__all__ = ["model", "output", "prompts"]  # fixtures


@pytest.mark.parametrize("kept", [slice(15), slice(3, 31), slice(0, 47, 2), slice(46, 47)])
def test_rows_that_are_written_are_followed_and_not_computed_again(
    model: Path, prompts: Path, output: Path, kept: slice
) -> None:
    few = {"zinfer": {"max_sequences": 4}}
    before = run(model, prompts, output, config=few)
    whole = output.read_bytes().splitlines(keepends=True)
    output.write_bytes(b"".join(whole[kept]))
    summary = run(model, prompts, output, config=few)
    assert sorted(output.read_bytes().splitlines(keepends=True)) == sorted(whole)
    left_out = sum(int(note.split()[0]) for note in summary.notes if "passes were left out" in note)
    assert before.stats is not None
    assert summary.stats is not None
    assert summary.stats.passes + left_out == before.stats.passes, "no batch is complete"
    assert left_out or kept != slice(15)
    assert any("keep their places in the passes" in note for note in summary.notes)
    assert not any("recomputing" in note for note in summary.notes)


def mixture_job(folder: Path, num_rows: int) -> tuple[Path, Path, Path]:
    """A mixture of experts, the file of as many rows, and that of their output."""
    tiny_mixtral().save_pretrained(folder / "model")
    letters_tokenizer().save_pretrained(folder / "model")
    prompts = random_prompts(num_rows, max_tokens=60)
    rows = [{"id": f"{number}", "prompt_token_ids": ids} for number, ids in enumerate(prompts)]
    return folder / "model", write_rows(folder / "in.jsonl", rows), folder / "out.jsonl"


def test_rows_of_mixtures_are_computed_again_with_those_that_share_their_passes(tmp_path: Path) -> None:
    model, prompts, output = mixture_job(tmp_path, 8)
    before = run(model, prompts, output)
    whole = output.read_bytes()
    output.write_bytes(b"".join(whole.splitlines(keepends=True)[:5]))
    summary = run(model, prompts, output)
    assert output.read_bytes() == whole
    assert before.stats is not None
    assert summary.stats is not None
    assert summary.stats.passes == before.stats.passes
    assert any("recomputing 5 finished rows with 3 missing ones" in note for note in summary.notes)
    assert "if stopped, at most 8 rows are computed again" in " ".join(summary.notes)


def test_tokens_that_others_wrote_into_a_row_are_not_believed(model: Path, prompts: Path, output: Path) -> None:
    run(model, prompts, output)
    whole = output.read_bytes().splitlines(keepends=True)
    strange = {"token_ids": [1, 100_000]}, {"token_ids": ["1"]}, {"token_ids": [True]}, {"outputs": [3, 4]}
    lines = [
        json.dumps({"id": json.loads(line)["id"], **each}).encode() for line, each in zip(whole, strange, strict=False)
    ]
    output.write_bytes(b"".join(line + b"\n" for line in lines))
    summary = run(model, prompts, output)
    assert any(f"recomputing {len(strange)} finished rows" in note for note in summary.notes)
    assert sorted(output.read_bytes().splitlines(keepends=True)[len(strange) :]) == sorted(whole[len(strange) :])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kept", [slice(17), slice(3, 31), slice(0, 47, 2)])
def test_rows_that_are_written_are_left_out_if_so_asked(
    model: Path, prompts: Path, output: Path, monkeypatch: pytest.MonkeyPatch, kept: slice
) -> None:
    run(model, prompts, output)
    whole = output.read_bytes().splitlines(keepends=True)
    output.write_bytes(b"".join(whole[kept]))
    written = {row["id"] for row in read_rows(output)}
    computed: list[int] = []
    stream = LLM.stream

    def counted(llm: LLM, prompts: Any, *args: Any, **options: Any) -> Any:
        computed.append(len(prompts))
        return stream(llm, prompts, *args, **options)

    monkeypatch.setattr(LLM, "stream", counted)
    summary = run(model, prompts, output, only_missing=True)
    assert summary.num_skipped == len(whole[kept])
    assert sum(computed) == len({row["id"] for row in ROWS} - written - {"bad", "worse"})
    assert not any("recomputing" in note for note in summary.notes)
    assert any("are computed again; written rows are not" in note for note in summary.notes)

    def texts(rows: list[dict[str, Any]]) -> dict[str, Any]:  # without log-probabilities, which may differ in a bit
        return {row["id"]: {key: value for key, value in row.items() if key != "logprobs"} for row in rows}

    assert texts(read_rows(output)) == texts([json.loads(line) for line in whole])


def sizes_of(output: Path) -> int:
    return int(json.loads(manifest_path(output).read_text())["settings"]["batch_size"])


@pytest.mark.slow
def test_a_mixture_s_job_of_long_batches_takes_smaller_ones_and_keeps_to_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zinfer.jobs.completer._MOST_BATCH_S", 0.0)
    monkeypatch.setattr("zinfer.jobs.completer._LEAST_PACE", 0.4)
    model, prompts, output = mixture_job(tmp_path, 40)
    summary = run(model, prompts, output, batch_size=None)
    assert 1 <= sizes_of(output) < 40
    assert any("if stopped, at most " in note for note in summary.notes)
    whole = output.read_bytes()
    output.write_bytes(b"".join(whole.splitlines(keepends=True)[:3]))
    monkeypatch.undo()
    run(model, prompts, output, batch_size=None)
    assert sorted(output.read_bytes().splitlines()) == sorted(whole.splitlines())


def test_batches_have_as_many_rows_each_and_are_as_large_as_they_may(
    model: Path, prompts: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zinfer.jobs.completer._MOST_BATCH_S", 0.0)
    for name in ("completer", "execution_mode"):
        monkeypatch.setattr(f"zinfer.jobs.{name}.ROWS_TOGETHER", 20)
    run(model, prompts, output, batch_size=None)
    assert sizes_of(output) == -(-len(ROWS) // 3)
