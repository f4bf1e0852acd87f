"""Runs a function in several processes that form a group of ranks over gloo."""

import os
import pickle
import signal
import socket
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from commands import context


@dataclass
class Failed:
    """What a rank raised."""

    kind: str
    text: str


class Ranks:
    """Processes that run ``function(rank, *args)``, a function of a module.

    Args:
        size: number of ranks.
    """

    def __init__(self, size: int, function: Callable[..., Any], *args: Any) -> None:
        port = free_port()
        self._pipes: list[Connection] = []
        self.processes = []
        for rank in range(size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_run, args=(theirs, rank, size, port, function, args))
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    def kill(self, rank: int, number: signal.Signals = signal.SIGKILL) -> None:
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def result_of(self, rank: int, timeout_s: float = 120) -> Any:
        """What a rank returned, `Failed`, or None if it was killed."""
        if not self._pipes[rank].poll(timeout_s):
            raise AssertionError(f"rank {rank} neither returned nor failed in {timeout_s} s")
        try:
            return pickle.loads(self._pipes[rank].recv_bytes())
        except EOFError:
            return None

    def results(self) -> list[Any]:
        """What each rank returned, as `result_of`; checks that all processes end."""
        try:
            found = [self.result_of(rank) for rank in range(len(self._pipes))]
            for rank, process in enumerate(self.processes):
                process.join(30)
                assert process.exitcode is not None, f"rank {rank} lives on"
            return found
        finally:
            self.end()

    def end(self) -> None:
        """Kill what is left."""
        for process in self.processes:
            process.kill()
            process.join()


def run_ranks(size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """What ``function(rank, *args)`` returns on each rank; raises if one fails."""
    found = Ranks(size, function, *args).results()
    for rank, each in enumerate(found):
        assert not isinstance(each, Failed), f"rank {rank}: {each.text}"
    return found


def wait_for_all() -> None:
    """Wait until all ranks are here, if there are several."""
    if dist.is_initialized():
        dist.all_reduce(torch.zeros(1))


def _run(
    pipe: Connection, rank: int, size: int, port: int, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    # Ranks may share a GPU, for tests on one.
    num_places = torch.cuda.device_count() or size
    os.environ.update(LOCAL_RANK=str(rank % num_places), TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES="1")
    try:
        found = function(rank, *args)
    except Exception as failure:
        found = Failed(type(failure).__name__, "".join(traceback.format_exception(failure)))
    pipe.send_bytes(pickle.dumps(found))


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
