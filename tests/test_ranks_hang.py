"""A rank whose disk does not answer any more beats as before, and its passes stand still: it ends the job itself."""

import json
import socket
from pathlib import Path
from typing import Final

import pytest
from commands import start
from jobs_support import letters_model, prompt_rows, write_rows
from ranks_job_support import Job, ended, run_in_ranks

from zinfer.ranks import progress as progress_module
from zinfer.ranks.progress import Progress

NUM_ROWS: Final = 24
HANGING: Final = """
import os
import threading
import zinfer.ranks.progress as progress

progress._LEAST_S, progress._FIRST_PASSES = 5.0, 2
read = os.preadv
output = os.environ["TEST_OUTPUT"]

def hang(*args):
    while os.environ["RANK"] == os.environ["TEST_RANK"] and os.path.exists(output) and os.path.getsize(output):
        threading.Event().wait()
    return read(*args)

os.preadv = hang
"""
"""Lets a rank's reads hang once rows are written."""


@pytest.fixture
def job(tmp_path: Path) -> Job:
    letters_model(tmp_path / "model", num_layers=4)
    write_rows(tmp_path / "in.jsonl", prompt_rows(NUM_ROWS))
    return Job(tmp_path, "out.jsonl", "--batch-size", "4", "--ranks", "2")


@pytest.mark.sampled(8)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("mode", ["zero", "tensor", "pipeline", "replicas"])
def test_a_rank_whose_disk_hangs_ends_the_job(job: Job, mode: str, rank: int) -> None:
    settings = {
        "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": str(job.folder / "nvme")}},
        "zinfer": {"parallel": {mode: 2}},
    }
    (job.folder / "ds.json").write_text(json.dumps(settings))
    variables = {
        **run_in_ranks(job.folder, HANGING),
        "TEST_RANK": str(rank),
        "TEST_OUTPUT": str(job.output),
    }
    [(code, _, said)] = ended([start(job.words, job.folder, warm=True, variables=variables)])
    assert code == 1, said
    assert f"rank {rank} on {socket.gethostname()} has stood still in a pass for " in said
    assert said.count("error:") == 1
    assert "The rows in out.jsonl are kept" in said
    assert 0 < len(job.rows()) < NUM_ROWS


def test_a_pass_hangs_if_it_takes_ten_times_as_long_as_any_step_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "_FIRST_PASSES", 1)
    progress = Progress(sees_waits=True)

    def look(for_s: int) -> str | None:
        """The first look sees how far the pass has come."""
        return [progress.find_hang(1.0) for _ in range(1 + for_s)][-1]

    assert look(2000) is None, "no pass is under way"
    progress.begin_pass()
    assert look(6) is None
    progress.note_step()
    assert look(3) is None
    progress.end_pass()
    assert look(2000) is None
    with progress.taking_part():
        with progress.waiting():
            assert look(2000) is None, "another rank may hang"
        assert look(60) is None, "ten times the longest step"
        assert progress.find_hang(1.0) == (
            "has stood still in a pass for 61 s, where no step took more than 6 s before: its disk or its GPU hangs"
        )
        progress.note_step()
        assert look(60) is None
    progress = Progress(sees_waits=True)
    with progress.taking_part():
        pass
    with progress.taking_part():
        assert look(60) is not None, "which compiles nothing, of a rank without rows of its own too"
    progress.begin_pass()
    assert look(900) is None, "the first pass compiles"
    assert progress.find_hang(1.0) is not None
