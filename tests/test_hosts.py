"""Ranks of a job on several hosts: started by SLURM's variables or by an agent of torchrun on each.

The hosts are names, and folders of their own that hold the model; only rank 0's has the rows.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest
from commands import Process, start
from jobs_support import letters_model, prompt_rows, write_rows
from ranks_job_support import CONFIG, Job, ended
from ranks_support import free_port

NUM_ROWS = 24
OPTIONS = ("--batch-size", "2")
MASTER = {"MASTER_ADDR": "127.0.0.1", "TORCH_CPP_LOG_LEVEL": "ERROR"}


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folders of two hosts."""
    folders = tmp_path_factory.mktemp("node0"), tmp_path_factory.mktemp("node1")
    for folder in folders:
        letters_model(folder / "model", num_layers=4)
        (folder / "ds.json").write_text(CONFIG)
    write_rows(folders[0] / "in.jsonl", prompt_rows(NUM_ROWS))
    return folders


@pytest.fixture(scope="module")
def whole(nodes: tuple[Path, Path]) -> list[bytes]:
    """The rows of one process."""
    job = Job(nodes[0], "whole.jsonl", *OPTIONS)
    job.run(1)
    assert len(job.rows()) == NUM_ROWS
    return job.rows()


def start_by_slurm(job: Job, nodes: tuple[Path, Path]) -> list[Process]:
    """One rank on the first host and two on the second, as `srun` starts them: with its variables only."""
    port = str(free_port())
    found = []
    for rank, (node, local_rank) in enumerate(((0, 0), (1, 0), (1, 1))):
        slurm = {"SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(local_rank)}
        slurm |= {"SLURMD_NODENAME": f"node{node}", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
        found.append(start(job.words, nodes[node], warm=True, variables={**slurm, **MASTER, "MASTER_PORT": port}))
    return found


def test_slurms_tasks_share_a_job_without_a_folder_of_all(nodes: tuple[Path, Path], whole: list[bytes]) -> None:
    job = Job(nodes[0], "slurm.jsonl", *OPTIONS)
    said = ended(start_by_slurm(job, nodes))
    assert [code for code, _, _ in said] == [0, 0, 0], said
    assert [(out, err) for _, out, err in said[1:]] == [("", "")] * 2, "only rank 0 speaks"
    assert job.rows() == whole
    assert re.search(r"ranks +│ 3: \d+, \d+, \d+ passes", said[0][1]), said[0][1]
    assert {path.name for path in nodes[1].iterdir()} == {"model", "ds.json"}


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_killed_rank_ends_both_hosts(nodes: tuple[Path, Path], whole: list[bytes], lost: int) -> None:
    job = Job(nodes[0], f"killed-{lost}.jsonl", *OPTIONS)
    processes = start_by_slurm(job, nodes)
    job.wait_for_rows(processes, 0)
    processes[lost].kill()
    said = ended(processes)
    assert [code for code, _, _ in said] == [-signal.SIGKILL if rank == lost else 1 for rank in range(3)], said
    if lost:
        assert f"error: rank {lost} on node1 ended without a word" in said[0][2]
        assert "The rows in killed-2.jsonl are kept; run the same command again to go on" in said[0][2]
        assert said[1][2] == "", "rank 0 speaks"
    else:
        for _, _, error in said[1:]:
            assert (
                error
                == "zinfer: error: rank 0 on node0 ended without a word: it was killed, or has lost its connection\n"
            )
    assert set(job.rows()) < set(whole)
    assert [code for code, _, _ in ended(start_by_slurm(job, nodes))] == [0, 0, 0]
    assert job.rows() == whole


def test_a_port_in_use_is_told(nodes: tuple[Path, Path]) -> None:
    job = Job(nodes[0], "refused.jsonl", *OPTIONS)
    variables = {"WORLD_SIZE": "2", **MASTER}
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = str(used.getsockname()[1])
        first = start(job.words, nodes[0], warm=True, variables={**variables, "RANK": "0", "MASTER_PORT": port})
        [(code, _, said)] = ended([first])
    assert code == 2
    assert f"(port {port}: Address already in use); set MASTER_PORT to a free port" in said.replace("\n", " ")
    assert not job.output.exists()


class Agents:
    """An agent of torchrun for each of two hosts."""

    def __init__(self, job: Job, nodes: tuple[Path, Path], per_node: int) -> None:
        endpoint = f"127.0.0.1:{free_port()}"
        self.agents = [self._start(job, nodes[node], node, per_node, endpoint) for node in range(2)]

    def _start(self, job: Job, folder: Path, node: int, per_node: int, endpoint: str) -> "subprocess.Popen[str]":
        words = ["--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", str(per_node), "--rdzv-id", "job"]
        words += [
            "--rdzv-conf",
            f"is_host={node == 0}",
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            endpoint,
            "--local-addr",
            "127.0.0.1",
            "-m",
            "zinfer",
        ]
        return subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *words, *job.words],
            cwd=folder,
            env=self._environment(node),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    @staticmethod
    def _environment(node: int) -> Mapping[str, str]:
        return {**os.environ, "SLURMD_NODENAME": f"node{node}", "OMP_NUM_THREADS": "1"}

    def ranks(self, node: int) -> dict[int, psutil.Process]:
        """The processes of a host by their ranks."""
        found = psutil.Process(self.agents[node].pid).children(recursive=True)
        return {int(each.environ()["RANK"]): each for each in found if "RANK" in each.environ()}


@pytest.mark.slow
def test_two_agents_of_torchrun_share_a_job(nodes: tuple[Path, Path], whole: list[bytes]) -> None:
    job = Job(nodes[0], "torchrun.jsonl", *OPTIONS)
    said = ended(Agents(job, nodes, 2).agents)
    assert [code for code, _, _ in said] == [0, 0], said
    assert job.rows() == whole
    assert f"{NUM_ROWS} done, 0 failed" in said[0][1]
    assert said[1][1] == "", "only rank 0 speaks"
    assert {path.name for path in nodes[1].iterdir()} == {"model", "ds.json"}


@pytest.mark.slow
@pytest.mark.parametrize("has_joined", [True, False])
def test_a_killed_rank_ends_both_agents(nodes: tuple[Path, Path], whole: list[bytes], has_joined: bool) -> None:
    job = Job(nodes[0], f"agents-{has_joined}.jsonl", *OPTIONS)
    agents = Agents(job, nodes, 1)
    if has_joined:
        job.wait_for_rows(agents.agents, 0)
    else:
        while not (agents.ranks(0) and agents.ranks(1)):
            assert all(agent.poll() is None for agent in agents.agents)
            time.sleep(0.05)
    agents.ranks(1)[1].kill()
    said = ended(agents.agents)
    assert all(code == 1 for code, _, _ in said), said
    wanted = "rank 1 on node1 ended without a word" if has_joined else "rank 1 of 2( on node1)? has not joined"
    assert re.search(wanted, said[0][2]), said[0][2]
    assert not job.output.exists() or set(job.rows()) <= set(whole)
