"""Ranks that are stopped while no other watches them, and launchers that are stopped with them or killed."""

import os
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

import psutil
import pytest
from commands import Process, start
from jobs_support import letters_model, prompt_rows, write_rows
from ranks_job_support import END_S, Job, ended

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


def launched(job: Job, when: str = "", most_stopped_s: int = STOPPED_S) -> Process:
    variables = {"PYTHONPATH": os.pathsep.join([str(job.folder), os.environ.get("PYTHONPATH", "")]), "TEST_WHEN": when}
    prepare = (hasten, (most_stopped_s,))
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


def test_a_stopped_rank_ends_when_its_launcher_is_killed(job: Job) -> None:
    (job.folder / "sitecustomize.py").write_text(STOPPING)
    launcher = launched(job, "end", most_stopped_s=3600)
    own, ranks = psutil.Process(launcher.pid), dict[str, psutil.Process]()
    while "1" not in ranks or ranks["1"].status() != psutil.STATUS_STOPPED:
        assert launcher.poll() is None, launcher.communicate()
        for each in own.children():
            with suppress(psutil.Error):  # rank 0 may end meanwhile
                ranks[each.environ().get("RANK", "")] = each
        time.sleep(0.05)
    launcher.kill()
    try:
        _, alive = psutil.wait_procs([*ranks.values()], END_S)
        assert not alive
    finally:
        for each in ranks.values():
            if each.is_running():
                each.kill()  # or the launcher's pipes would never end
    [(code, _, _)] = ended([launcher])
    assert code == -signal.SIGKILL


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
