"""A rank that is stopped ends the others, whatever they do at the time, with one message; the job resumes."""

import shutil
import socket
import time
from pathlib import Path
from typing import Final

import pytest
from commands import start
from jobs_support import letters_model, prompt_rows, read_rows, write_rows
from ranks_job_support import END_S, Job, ended, ranks_of, run_in_ranks

NUM_ROWS = 24
SILENCE_S = 10
CONFIGS: Final = {"zero": "{}", "tensor": '{"tensor_parallel": {"tp_size": 2}}'}
REHEARSED: Final = """
import os
import sys
import threading
import time
from pathlib import Path

for module in [*sys.modules.values()]:
    if module.__name__.startswith("zinfer.ranks.") and hasattr(module, "SILENCE_S"):
        module.SILENCE_S = int(os.environ["TEST_SILENCE_S"])
from zinfer.jobs.peer_worker import PeerWorker
from zinfer.jobs.peers import Peers

notes = Path(os.environ["TEST_NOTES"])
waits = os.environ["TEST_WHERE"] == "waits"
compute, share, hand_out, next_message = PeerWorker._compute, Peers.share, Peers._hand_out, PeerWorker._next
has_computed, has_shared = [], []

def compute_long(self, completer, work):
    if has_computed and not waits:
        (notes / "now").touch()
        while True:
            compute(self, completer, work)
    compute(self, completer, work)
    has_computed.append(True)

def next_noted(self):
    if has_computed and waits:
        threading.Timer(0.5, (notes / "now").touch).start()
    return next_message(self)

def hand_out_no_more(self, peer):
    if has_computed and waits:
        threading.Event().wait()
    has_computed.append(True)
    hand_out(self, peer)

def share_no_more(self, prompts, missing):
    def must_wait():
        if self._followers[0]:
            return waits and has_computed
        return not waits and has_shared and not (notes / "now").exists()

    while must_wait():
        self.check()
        time.sleep(0.05)
    share(self, prompts, missing)
    has_shared.append(True)
    if self._followers[0]:
        has_computed.append(True)

PeerWorker._compute, PeerWorker._next = compute_long, next_noted
Peers._hand_out, Peers.share = hand_out_no_more, share_no_more
"""
"""Lets rank 1 wait for its second batch, or compute it for good, and says when it does; rank 0 leaves it one."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return letters_model(tmp_path_factory.mktemp("stopped") / "model")


def stopped(job: Job, where: str, rank: int) -> tuple[int | None, str]:
    """The exit code and stderr of a launcher of which a rank was stopped; checks that no process is left."""
    variables = {
        **run_in_ranks(job.folder, REHEARSED),
        **{"TEST_SILENCE_S": str(SILENCE_S), "TEST_NOTES": str(job.folder), "TEST_WHERE": where},
    }
    launcher = start(job.words, job.folder, warm=True, variables=variables)
    job.wait_for_rows([launcher], 0)
    while not (job.folder / "now").exists():
        assert launcher.poll() is None, launcher.communicate()
        time.sleep(0.01)
    numbered = ranks_of(launcher.pid)
    ranks = [*numbered.values()]
    numbered[rank].suspend()
    try:
        launcher.wait(END_S)
        assert not [each for each in ranks if each.is_running()]
    finally:
        for each in ranks:
            if each.is_running():
                each.kill()  # or the launcher's pipes would never end
    [(code, _, said)] = ended([launcher])
    return code, said


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("where", ["waits", "computes"])
@pytest.mark.parametrize("mode", CONFIGS)
def test_a_stopped_rank_ends_the_job_which_resumes(
    model: Path, tmp_path: Path, mode: str, where: str, rank: int
) -> None:
    shutil.copytree(model, tmp_path / "model")
    write_rows(tmp_path / "in.jsonl", prompt_rows(NUM_ROWS))
    (tmp_path / "ds.json").write_text(CONFIGS[mode])
    job = Job(tmp_path, "out.jsonl", "--batch-size", "4", "--ranks", "2")
    code, said = stopped(job, where, rank)
    assert code == 1, said
    silent = f"rank {rank} on {socket.gethostname()} has not answered for {SILENCE_S} s: it was stopped, or hangs"
    told = f"zinfer: error: {silent}. The rows in out.jsonl are kept; run the same command again to go on\n"
    assert said.endswith(told)
    assert said.count("error:") == 1
    assert not any(word in said for word in ("Traceback", "terminate called"))
    kept = job.rows()
    [(code, _, said)] = ended([start(job.words, tmp_path, warm=True)])
    assert code == 0, said
    assert set(kept) <= set(job.rows())
    assert sorted(row["id"] for row in read_rows(job.output)) == sorted(f"row-{n}" for n in range(NUM_ROWS))
