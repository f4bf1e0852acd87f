"""Runs a function in several processes that form a group of ranks over gloo."""

import faulthandler
import os
import pickle
import signal
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Final, Self

import torch
import torch.distributed as dist
from commands import context, forget_garbage, run_exit_functions

from zinfer.ranks.sockets import reserve_port

_POLL_S: Final = 0.05


@dataclass
class Failed:
    """What a rank raised."""

    kind: str
    text: str


class Ranks:
    """Processes that run ``function(rank, *args)``, a function of a module. As a context it kills what is left of them.

    Args:
        size: number of ranks.
    """

    def __init__(self, size: int, function: Callable[..., Any], *args: Any) -> None:
        port = free_port()
        self._folder = TemporaryDirectory(prefix="ranks-")
        self._pipes: list[Connection] = []
        self.processes = []
        for rank in range(size):
            ours, theirs = context.Pipe(duplex=False)
            given = (theirs, rank, size, port, self._stacks_of(rank), function, args)
            process = context.Process(target=_run, args=given)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    def kill(self, rank: int, number: signal.Signals = signal.SIGKILL) -> None:
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def wait_until(self, is_so: Callable[[], bool], timeout_s: float = 60) -> None:
        """Wait for what the ranks do; none of them may end before."""
        until_s = time.monotonic() + timeout_s
        while not is_so():
            for rank, pipe in enumerate(self._pipes):
                assert not pipe.poll(), f"rank {rank} has ended: {self.result_of(rank)}"
            assert time.monotonic() < until_s, f"the ranks took more than {timeout_s} s: {self._stacks()}"
            time.sleep(_POLL_S)

    def result_of(self, rank: int, timeout_s: float = 120) -> Any:
        """What a rank returned, `Failed`, or None if it was killed."""
        if not self._pipes[rank].poll(timeout_s):
            raise AssertionError(f"rank {rank} neither returned nor failed in {timeout_s} s: {self._stacks()}")
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
                assert process.exitcode is not None, f"rank {rank} lives on: {self._stacks()}"
            return found
        finally:
            self.end()

    def end(self) -> None:
        """Kill what is left."""
        for process in self.processes:
            process.kill()
            process.join()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def _stacks_of(self, rank: int) -> Path:
        return Path(self._folder.name) / f"rank-{rank}"

    def _stacks(self) -> str:
        """Where the threads of all ranks are."""
        for rank, process in enumerate(self.processes):
            if process.exitcode is None:
                self.kill(rank, signal.SIGUSR1)
        time.sleep(1.0)
        texts = [self._stacks_of(rank) for rank in range(len(self.processes))]
        return "\n".join(f"\n{each.name}:\n{each.read_text()}" for each in texts if each.exists())


def run_ranks(size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """What ``function(rank, *args)`` returns on each rank; raises if one fails."""
    found = Ranks(size, function, *args).results()
    failed = [f"rank {rank}: {each.text}" for rank, each in enumerate(found) if isinstance(each, Failed)]
    assert not failed, "\n".join(failed)
    return found


def wait_for_all() -> None:
    """Wait until all ranks are here, if there are several."""
    if dist.is_initialized():
        dist.all_reduce(torch.zeros(1))


def _run(
    pipe: Connection,
    rank: int,
    size: int,
    port: int,
    stacks: Path,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    forget_garbage()
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    # Ranks may share a GPU, for tests on one.
    num_places = torch.cuda.device_count() or size
    os.environ.update(LOCAL_RANK=str(rank % num_places), TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES="1")
    file = stacks.open("w")
    faulthandler.register(signal.SIGUSR1, file)
    try:
        found = function(rank, *args)
    except Exception as failure:
        found = Failed(type(failure).__name__, "".join(traceback.format_exception(failure)))
    pipe.send_bytes(pickle.dumps(found))
    run_exit_functions()


_ports: list[socket.socket] = []


def free_port() -> int:
    """A port for a rank 0: no other process is given it while this one lives."""
    _ports.append(reserve_port("127.0.0.1"))
    return int(_ports[-1].getsockname()[1])
