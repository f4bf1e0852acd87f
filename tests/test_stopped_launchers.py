"""Ranks that are stopped while no other watches them, and a launcher that is stopped with them."""

import os
import socket
import time
from pathlib import Path
from typing import Final

import psutil
import pytest
from commands import Process, start
from jobs_support import letters_model, prompt_rows, write_rows
from ranks_job_support import Job, ended

import zinfer.cli.rank_endings

STOPPED_S: Final = 2
STOPPING: Final = """
import atexit
import os
import signal

if os.environ.get("RANK") == "1":
    stop = lambda: os.kill(os.getpid(), signal.SIGSTOP)
    stop() if os.environ["TEST_WHEN"] == "start" else atexit.register(stop)
"""
"""Stops rank 1 before it does anything, or once it is done."""


def hasten(seconds: int) -> None:
    zinfer.cli.rank_endings.MOST_STOPPED_S = seconds  # type: ignore[misc]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    letters_model(tmp_path / "model")
    write_rows(tmp_path / "in.jsonl", prompt_rows(8))
    (tmp_path / "ds.json").write_text("{}")
    return Job(tmp_path, "out.jsonl", "--batch-size", "4", "--ranks", "2")


def launched(job: Job, when: str = "") -> Process:
    variables = {"PYTHONPATH": os.pathsep.join([str(job.folder), os.environ.get("PYTHONPATH", "")]), "TEST_WHEN": when}
    prepare = (hasten, (STOPPED_S,))
    return start(job.words, job.folder, warm=True, prepare=prepare, variables=variables, warms_others=False)


@pytest.mark.parametrize("when", ["start", "end"])
def test_a_rank_that_no_other_watches_is_killed_by_the_launcher(job: Job, when: str) -> None:
    (job.folder / "sitecustomize.py").write_text(STOPPING)
    [(code, _, said)] = ended([launched(job, when)])
    assert code == 1, said
    kept = "The rows in out.jsonl are kept" if when == "end" else ""
    told = f"zinfer: error: rank 1 on {socket.gethostname()} was stopped for {STOPPED_S} s. {kept}"
    assert told in said
    assert said.endswith("; run the same command again to go on\n")
    assert said.count("error:") == 1


@pytest.mark.slow
def test_time_in_which_the_launcher_is_stopped_too_does_not_count(job: Job) -> None:
    launcher = launched(job)
    own, ranks = psutil.Process(launcher.pid), []
    while len(ranks) < 2:
        ranks = [each for each in own.children() if "RANK" in each.environ()]
        time.sleep(0.05)
    stopped = [own, *ranks]
    for each in stopped:
        each.suspend()
    time.sleep(3 * STOPPED_S)
    for each in reversed(stopped):
        each.resume()
    [(code, _, said)] = ended([launcher])
    assert code == 0, said
