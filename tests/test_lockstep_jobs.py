"""Jobs of groups of ranks that compute each batch together: rows come once, and a lost rank ends all."""

import json
import signal
import socket
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from commands import start
from family_models import family_model
from jobs_support import letters_model, letters_tokenizer, prompt_rows, read_rows, write_rows
from lockstep_support import keep_step, keeping_step, one_thread
from ranks_job_support import Job, ended
from ranks_support import run_ranks

from zinfer.jobs.job import run_job
from zinfer.jobs.summary import JobSummary, summary_rows

PARALLEL = {"zero_optimization": {"offload_param": {"device": "cpu"}}, "zinfer": {"parallel": {"replicas": 4}}}
NUM_ROWS = 36


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("groups")
    letters_model(folder / "model")
    write_rows(folder / "in.jsonl", prompt_rows(NUM_ROWS))
    (folder / "ds.json").write_text(json.dumps(PARALLEL))
    return folder


def in_groups(rank: int, model: Path, rows: Path, output: Path, options: dict[str, Any]) -> JobSummary:
    """A job on two groups of two ranks."""
    with keeping_step(2):
        return run_job(model, rows, output, config=PARALLEL, device="cpu", batch_size=3, **options)


@pytest.mark.slow
def test_groups_of_ranks_write_each_row_once(folder: Path) -> None:
    files = (folder / "model", folder / "in.jsonl")
    with one_thread():
        run_job(*files, folder / "alone.jsonl", device="cpu", batch_size=3)
    wanted = {row["id"]: row for row in read_rows(folder / "alone.jsonl")}
    found = run_ranks(4, in_groups, *files, folder / "groups.jsonl", {})
    rows = read_rows(folder / "groups.jsonl")
    assert len(rows) == len(wanted) == NUM_ROWS
    assert {row["id"]: row for row in rows} == wanted
    stats = [found[0].stats, *found[0].other_ranks]
    passes = [each.passes for each in stats]
    assert passes[0] == passes[1] > 0
    assert passes[2] == passes[3] > 0
    said = dict(row for section in summary_rows(found[0]) for row in section)
    assert said["ranks"] == f"4, 2 to each pass: {', '.join(map(str, passes))} passes"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "class_name", "options"),
    [("bert", "BertModel", {"task": "embed"}), ("t5", "T5ForConditionalGeneration", {})],
)
def test_encoders_and_padded_batches_are_computed_together(
    tmp_path: Path, model_type: str, class_name: str, options: dict[str, Any]
) -> None:
    family_model(model_type, class_name).save_pretrained(tmp_path / "model")
    letters_tokenizer().save_pretrained(tmp_path / "model")
    rows = [{"id": f"row-{number}", "prompt": "abcdefgh"[: 1 + number % 8]} for number in range(12)]
    write_rows(tmp_path / "in.jsonl", rows if options else [{**row, "max_new_tokens": 4} for row in rows])
    files = (tmp_path / "model", tmp_path / "in.jsonl")
    with one_thread():
        run_job(*files, tmp_path / "alone.jsonl", device="cpu", batch_size=3, **options)
    found = run_ranks(4, in_groups, *files, tmp_path / "groups.jsonl", options)
    alone, together = ((tmp_path / f"{name}.jsonl").read_bytes().splitlines() for name in ("alone", "groups"))
    assert sorted(together) == sorted(alone)
    first, second, third, fourth = (each.passes for each in (found[0].stats, *found[0].other_ranks))
    assert first == second > 0
    assert third == fourth > 0


@pytest.mark.slow
@pytest.mark.parametrize("lost", [3, *(pytest.param(rank, marks=pytest.mark.slow) for rank in (2, 1, 0))])
def test_a_killed_rank_of_any_group_ends_all(folder: Path, lost: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("test_ranks_jobs.start", partial(start, prepare=(keep_step, (2,))))
    job = Job(folder, f"killed-{lost}.jsonl", "--batch-size", "4")
    processes = job.start(4)
    job.wait_for_rows(processes, 0)
    processes[lost].kill()
    said = ended(processes)
    codes = [code for code, _, _ in said]
    assert codes[lost] == -signal.SIGKILL
    assert [code for rank, code in enumerate(codes) if rank != lost] == [1, 1, 1], said
    if lost:
        host = socket.gethostname()
        assert (
            f"error: rank {lost} on {host} ended without a word: it was killed, or has lost its connection"
            in said[0][2]
        )
        assert said[0][2].count("error:") == 1
    kept = read_rows(job.output)
    assert len({row["id"] for row in kept}) == len(kept)
