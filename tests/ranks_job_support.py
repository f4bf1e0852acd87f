"""Jobs of several ranks in processes of their own, and how they end."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
from commands import Process, start
from ranks_support import free_port

CONFIG = '{"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}'
END_S = 60  # in which a failure of one rank ends the others
_IN_RANKS = """
import os

def begin():
    if "RANK" in os.environ and not begun:
        begun.append(True)
        exec(CODE, {"__name__": "in_ranks"})

begun = []
os.register_at_fork(after_in_child=begin)
begin()
"""


def run_in_ranks(folder: Path, code: str) -> dict[str, str]:
    """Let each rank of a command run code when it starts; returns variables for the command."""
    (folder / "sitecustomize.py").write_text(f"CODE = {code!r}\n{_IN_RANKS}")
    return {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}


def ranks_of(launcher: int) -> dict[int, psutil.Process]:
    """The ranks that a process has forked, by number."""
    found = {}
    for each in psutil.Process(launcher).children():
        name, _, rank = each.name().rpartition("-")
        if name == "zinfer-rank":
            found[int(rank)] = each
    return found


class Job:
    """`zinfer run` on the files of a folder, on one rank or several, in processes of its own."""

    def __init__(self, folder: Path, output: str, *options: str, rows: str = "in.jsonl") -> None:
        self.folder, self.output = folder, folder / output
        files = ["--model", "model", "--input", rows, "--output", output, "--config", "ds.json"]
        self.words = ["run", *files, "--device", "cpu", *options]

    def start(self, num_ranks: int, limit_bytes: int | None = None) -> list[Process]:
        """Start the ranks, as torchrun would."""
        port = free_port()
        found = []
        for rank in range(num_ranks):
            variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
            variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCH_CPP_LOG_LEVEL": "ERROR"}
            found.append(start(self.words, self.folder, warm=True, limit_bytes=limit_bytes, variables=variables))
        return found

    def run(self, num_ranks: int, exit_code: int = 0) -> str:
        """Run to the end; returns what rank 0 wrote to stdout."""
        said = ended(self.start(num_ranks))
        assert [code for code, _, _ in said] == [exit_code] * num_ranks, said
        assert [(out, err) for _, out, err in said[1:]] == [("", "")] * (num_ranks - 1), "only rank 0 speaks"
        return said[0][1]

    def rows(self) -> list[bytes]:
        """The lines of the output, sorted: ranks write them as they come."""
        return sorted(self.output.read_bytes().splitlines())

    def wait_for_rows(self, processes: Sequence[Process], num_bytes: int) -> None:
        while not self.output.exists() or self.output.stat().st_size <= num_bytes:
            assert all(process.poll() is None for process in processes), [each.communicate() for each in processes]
            time.sleep(0.001)


def ended(processes: Sequence[Process]) -> list[tuple[int | None, str, str]]:
    """Exit codes, stdout and stderr of processes that end in time."""
    try:
        said = [process.communicate(timeout=END_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *texts) for process, texts in zip(processes, said, strict=True)]
