"""How ranks start; ranks that are stopped while none watches them; launchers that are stopped with them or killed."""

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import psutil
import pytest
import torch
from commands import Process, start
from jobs_support import letters_model, prompt_rows, write_rows
from ranks_job_support import END_S, Job, ended, ranks_of, run_in_ranks

import zinfer.cli.rank_endings
from zinfer.cli.launch import launch
from zinfer.nvme.pool import start_thread

STOPPED_S: Final = 2
STOPPING: Final = """
import atexit
import os
import signal

if os.environ["RANK"] == "1":
    stop = lambda: os.kill(os.getpid(), signal.SIGSTOP)
    stop() if os.environ["TEST_WHEN"] == "start" else atexit.register(stop)
"""
"""Stops rank 1 before it does anything, or once it is done."""


NOTING: Final = """
import json, os, sys

rank = int(os.environ["RANK"])
with open(f"rank-{rank}", "w") as file:
    json.dump([os.getppid(), [*sys.modules]], file)
"""
"""Notes what a rank knows when it starts."""


def forbid_gpus() -> None:
    """Fail if this process asks for a GPU, whose children may: CUDA does not survive a fork."""
    own = os.getpid()

    def watched(call: Callable[..., Any], *args: Any) -> Any:
        assert os.getpid() != own, f"the launcher calls {call.__name__}"
        return call(*args)

    for name in ("is_available", "device_count", "current_device", "get_device_properties", "_lazy_init"):
        setattr(torch.cuda, name, partial(watched, getattr(torch.cuda, name)))


def hasten(seconds: int) -> None:
    zinfer.cli.rank_endings.MOST_STOPPED_S = seconds  # type: ignore[misc]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    letters_model(tmp_path / "model")
    write_rows(tmp_path / "in.jsonl", prompt_rows(8))
    (tmp_path / "ds.json").write_text("{}")
    return Job(tmp_path, "out.jsonl", "--batch-size", "4", "--ranks", "2")


def launched(job: Job, when: str = "", most_stopped_s: int = STOPPED_S) -> Process:
    variables = {"TEST_WHEN": when, **(run_in_ranks(job.folder, STOPPING) if when else {})}
    prepare = (hasten, (most_stopped_s,))
    return start(job.words, job.folder, warm=True, prepare=prepare, variables=variables)


@pytest.mark.parametrize("command", ["run", pytest.param("bench", marks=pytest.mark.slow)])
def test_ranks_are_forked_from_one_process_that_has_imported_all_and_opened_no_gpu(job: Job, command: str) -> None:
    device = "cpu" if torch.cuda.device_count() == 1 else "auto"
    bench = ["bench", "--model", "model", "--rows", "4", "--prompt-len", "4", "--new-tokens", "2", "--ranks", "2"]
    words = [*(job.words if command == "run" else bench), "--device", device]
    variables = {**run_in_ranks(job.folder, NOTING), "OPENBLAS_NUM_THREADS": "1"}
    launcher = start(words, job.folder, warm=False, prepare=(forbid_gpus, ()), variables=variables)
    [(code, _, said)] = ended([launcher])
    assert code == 0, said
    for rank in range(2):
        parent, modules = json.loads((job.folder / f"rank-{rank}").read_text())
        assert parent == launcher.pid
        assert {"torch", "transformers.modeling_utils", "zinfer.batching.llm"} <= {*modules}


def test_no_rank_is_forked_beside_a_thread() -> None:
    over = threading.Event()
    beside = start_thread("reading-ahead", over.wait, fail)
    try:
        with pytest.raises(RuntimeError, match=r"cannot be forked beside the threads .*reading-ahead"):
            launch(2, lambda: "")
    finally:
        over.set()
        beside.join()


def fail(failure: BaseException) -> None:
    raise failure


@pytest.mark.parametrize("when", ["start", pytest.param("end", marks=pytest.mark.slow)])
def test_a_rank_that_no_other_watches_is_killed_by_the_launcher(job: Job, when: str) -> None:
    [(code, _, said)] = ended([launched(job, when)])
    assert code == 1, said
    kept = "The rows in out.jsonl are kept" if when == "end" else ""
    told = f"zinfer: error: rank 1 on {socket.gethostname()} was stopped for {STOPPED_S} s. {kept}"
    assert told in said
    assert said.endswith("; run the same command again to go on\n")
    assert said.count("error:") == 1


@pytest.mark.slow
def test_a_stopped_rank_ends_when_its_launcher_is_killed(job: Job) -> None:
    launcher = launched(job, "end", most_stopped_s=3600)
    ranks = dict[int, psutil.Process]()
    while 1 not in ranks or ranks[1].status() != psutil.STATUS_STOPPED:
        assert launcher.poll() is None, launcher.communicate()
        with suppress(psutil.Error):  # rank 0 may end meanwhile
            ranks |= ranks_of(launcher.pid)
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
    while len(ranks := ranks_of(launcher.pid)) < 2:
        time.sleep(0.05)
    stopped = [psutil.Process(launcher.pid), *ranks.values()]
    for each in stopped:
        each.suspend()
    time.sleep(3 * STOPPED_S)
    for each in reversed(stopped):
        each.resume()
    [(code, _, said)] = ended([launcher])
    assert code == 0, said
