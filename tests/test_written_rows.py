"""Jobs that go on: what becomes of rows that are written, and how large batches are for it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from checkpoints import random_prompts, tiny_mixtral
from jobs_run_support import model, output
from jobs_support import letters_tokenizer, read_rows, write_rows
from test_jobs_batched import ROWS, prompts, run

from zinfer.batching.llm import LLM
from zinfer.jobs.request import manifest_path
from zinfer.jobs.summary import summary_rows

__all__ = ["model", "output", "prompts"]  # fixtures


@pytest.mark.sampled(4)
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
    assert before.stats is not None
    assert summary.stats is not None
    left_out = summary.stats.passes_left_out
    assert summary.stats.passes + left_out == before.stats.passes, "no batch is complete"
    assert left_out or kept != slice(15)
    shown = dict(row for section in summary_rows(summary) for row in section)["passes"]
    assert shown.endswith(f"; {left_out} with written rows alone were left out") == bool(left_out)
    assert any("keep their places in the passes" in note for note in summary.notes)
    assert not any("recomputing" in note for note in summary.notes)


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [40, 20])
def test_the_passes_of_what_is_left_are_predicted(model: Path, output: Path, batch_size: int) -> None:
    rows = [
        {
            "id": f"{number}",
            "prompt": f"{chr(97 + number % 26)}{number:02}",
            "max_new_tokens": 3 + number % 7,
            "ignore_eos": True,
        }
        for number in range(40)
    ]
    prompts = write_rows(output.with_name("in.jsonl"), rows)
    few: dict[str, Any] = {"config": {"zinfer": {"max_sequences": 4}}, "batch_size": batch_size}
    run(model, prompts, output, **few)
    whole = output.read_bytes()
    output.write_bytes(b"".join(whole.splitlines(keepends=True)[:15]))
    summary = run(model, prompts, output, **few)
    assert output.read_bytes() == whole
    [told] = [note for note in summary.notes if note.startswith("predicted: ")]
    passes = sum(int(number) for number in re.findall(r"([0-9]+) passes", told))
    assert summary.stats is not None
    assert summary.stats.passes_left_out > 0
    assert passes == summary.stats.passes
    assert summary.predicted_tokens_per_s < 40 * 9 / summary.predicted_s


@pytest.mark.slow
def test_what_may_change_last_bits_is_said(model: Path, prompts: Path, output: Path) -> None:
    run(model, prompts, output)
    lines = output.read_bytes().splitlines(keepends=True)
    kept = json.loads(manifest_path(output).read_text())
    changes: list[tuple[dict[str, Any], str]] = [
        ({}, ""),
        ({"divided": {"tensor": 2}}, "tensor 2, now undivided layers"),
        ({"sizes": {**kept["sizes"], "swaps_to_disk": 1}}, "swaps_to_disk 1, now none"),
        ({"sizes": {**kept["sizes"], "most_swapped_pages": 1}}, "most_swapped_pages 1, now "),
        (
            {"sizes": {key: kept["sizes"][key] for key in kept["sizes"] if key != "most_swapped_pages"}},
            "pages none, now ",
        ),
    ]
    for change, told in changes:
        output.write_bytes(b"".join(lines[:20]))
        manifest_path(output).write_text(json.dumps({**kept, **change}))
        notes = [
            note for note in run(model, prompts, output).notes if "last bits of the missing rows may differ" in note
        ]
        assert [told in note for note in notes] == [True] * bool(told), (notes, told)


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
    assert any("rows under way are computed again" in note for note in summary.notes)

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
