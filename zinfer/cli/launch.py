"""Forks a command into its ranks on this host, and says how they ended.

[Note: ranks are forked] The launcher imports what the command needs, once, and forks itself into the ranks. Of other
threads a fork keeps nothing but the locks that they hold, and CUDA does not survive it: the launcher starts no thread
before, computes nothing, and asks no GPU.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from math import inf, prod
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Final
from uuid import uuid4

import typer

from zinfer.cli.ending import EXIT_ROWS_FAILED, EXIT_STOPPED, ending_signals, say
from zinfer.cli.rank_endings import LAUNCHER, LOOK_S, SilenceWatch, first_cause, read_endings
from zinfer.errors import ConfigError, RankError
from zinfer.ranks.announcing import announce
from zinfer.ranks.environment import KEY, draw_key, host_name, is_several, num_started
from zinfer.ranks.sockets import LOOPBACK, SILENCE_S, reserve_port

if TYPE_CHECKING:
    from zinfer.config.parallel import Parallel

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NAME: Final = 15
_MOST_RANKS: Final = 256
_BY_NVML: Final = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Lets `torch.cuda.is_available` ask NVML: packages call it when they are imported, and CUDA would be opened by it."""
_AGAIN: Final = "run the same command again to go on"
_PAUSE_S: Final = 0.02
_MOST_ENDING_S: Final = 30.0
"""In which ranks that were asked to end do so; then they are killed."""


def choose_num_ranks(
    stated: int | None, device: str, parallel: "Parallel | None" = None, most: int | None = None
) -> int:
    """Return how many processes a command starts for its job; 1: it computes itself. Says so if it chooses several.

    Args:
        stated: the number that the user gave.
        device: the configured one: "auto", "cuda" or "cpu".
        parallel: the configured sizes, for a command that uses all GPUs unless it is told; None: one process does.
        most: ranks that the job has work for; None: any number.

    Raises:
        ConfigError: the number is more than there are GPUs, or than a host is to start.
    """
    if is_several() or (stated is None and parallel is None):
        chosen = 1
    else:
        chosen = _choose_for_gpus(stated, device, parallel, most)
    if chosen == 1:
        os.environ.pop(_BY_NVML, None)
    return chosen


def _choose_for_gpus(stated: int | None, device: str, parallel: "Parallel | None", most: int | None) -> int:
    num_gpus = 0 if device == "cpu" else _count_gpus()
    if stated is None:
        assert parallel is not None
        chosen = _most_ranks(min(num_gpus, most or num_gpus), parallel)
        if chosen > 1:
            say(f"{chosen} ranks, one for each GPU (--ranks 1: one process)")
        return chosen
    if stated > num_gpus and (num_gpus or device == "cuda"):
        raise ConfigError(
            f"--ranks {stated} needs {stated} GPUs, and torch sees {num_gpus}; give fewer, or --device cpu"
        )
    if stated > _MOST_RANKS:
        raise ConfigError(f"--ranks {stated} is more than {_MOST_RANKS} processes on one host; give fewer")
    return stated


def _count_gpus() -> int:
    """Return how many GPUs torch sees. A child looks, for without NVML that opens CUDA ([Note: ranks are forked])."""
    import torch

    result, child_result = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            found = str(torch.cuda.device_count())
        except BaseException as error:
            found = f"{type(error).__name__}: {error}"
        os.write(child_result, found.encode())
        os._exit(0)
    os.close(child_result)
    with open(result) as counted:
        found = counted.read()
    _, status = os.waitpid(child, 0)
    if not found.isdecimal():
        why = found or f"exit code {os.waitstatus_to_exitcode(status)}"
        raise RankError(f"torch could not count the GPUs ({why}); try `nvidia-smi`, or use --device cpu")
    return int(found)


def _most_ranks(num_gpus: int, parallel: "Parallel") -> int:
    """Return the most ranks that the configured sizes allow on so many GPUs; 1 if there are too few."""
    size = prod(each or 1 for each in vars(parallel).values())
    found = size if parallel.replicas is not None else num_gpus // size * size
    return found if 1 <= found <= num_gpus else 1


def check_mesh(parallel: "Parallel", num_ranks: int) -> None:
    """Raise ConfigError unless the configured sizes of modes multiply to this number of ranks."""
    from zinfer.ranks.mesh import Mesh

    Mesh.of(vars(parallel), [LOOPBACK] * num_ranks)


def begin_rank(stated: int | None) -> None:
    """Announce this process to the others it was started with, if any; called before torch is imported.

    Args:
        stated: the number of ranks that the user gave, if any.

    Raises:
        ConfigError: the number differs from that of the processes started; or as `announce`.
    """
    if not is_several():
        # Read when torch is imported; in ranks, which may be forked later, each wait that is over is a warning.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        os.environ.setdefault(_BY_NVML, "1")
        return
    if stated is not None and stated != num_started():
        raise ConfigError(f"--ranks is {stated}, but {num_started()} processes were started; leave --ranks out")
    announce(SILENCE_S)


def launch(num_ranks: int, kept: Callable[[], str]) -> None:
    """Fork this process into ranks; returns in each of them. The launcher watches them, and ends as rank 0 does.

    Everything that the ranks need should have been imported ([Note: ranks are forked]).

    Args:
        kept: returns a message on what the same command can resume from.
    """
    _check_threads()
    file, reserved = f"/proc/self/fd/{os.memfd_create('zinfer-rank-endings')}", reserve_port(LOOPBACK)
    received: list[int] = []
    former = signal.pthread_sigmask(signal.SIG_BLOCK, ending_signals())
    pids = _fork_ranks(num_ranks, file, reserved.getsockname()[1])
    if pids is None:
        reserved.close()
        signal.pthread_sigmask(signal.SIG_SETMASK, former)
        os.environ.pop(_BY_NVML, None)
        announce(SILENCE_S)
        return
    for number in ending_signals():
        signal.signal(number, lambda number, _: received.append(number))
    signal.pthread_sigmask(signal.SIG_SETMASK, former)
    ranks, endings = _Ranks(pids), Path(file)
    try:  # the port is rank 0's as long as it is reserved
        _watch(ranks, SilenceWatch(endings, lambda: f"{kept()}; {_AGAIN}"), received)
    finally:
        ranks.send(signal.SIGKILL)  # none is left, unless they could not be watched
        reserved.close()
    exit_code = _say_how_ended(ranks.exit_codes, endings, received, kept)
    raise typer.Exit(exit_code)


def _check_threads() -> None:
    """Raise RuntimeError if another thread of Python runs."""
    others = [each.name for each in threading.enumerate() if each is not threading.current_thread()]
    if others:
        raise RuntimeError(f"ranks cannot be forked beside the threads {', '.join(others)}: start those in the ranks")


def _fork_ranks(num_ranks: int, endings: str, port: int) -> dict[int, int] | None:
    """Return the process of each rank; None in the ranks, whose variables are those of torchrun."""
    launcher, before, found = os.getpid(), dict(os.environ), dict[int, int]()
    shared = {
        LAUNCHER: endings,
        KEY: os.environ.get(KEY, draw_key()),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": uuid4().hex,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # or each rank would write what it holds
    for rank in range(num_ranks):
        os.environ.update(shared, RANK=str(rank), LOCAL_RANK=str(rank))
        found[rank] = os.fork()
        if found[rank] == 0:
            _become_rank(rank, launcher)
            return None
    os.environ.clear()
    os.environ.update(before)
    return found


def _become_rank(rank: int, launcher: int) -> None:
    """Leave the launcher's session; get SIGTERM when it ends.

    The kernel sends SIGCONT, which a stopped process hears too; SIGTERM would wait until somebody lets it go on.
    """

    def end_if_alone(number: int, frame: FrameType | None) -> None:
        if os.getppid() != launcher:
            os.kill(os.getpid(), signal.SIGTERM)

    import torch

    os.setsid()
    signal.signal(signal.SIGCONT, end_if_alone)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)
    libc.prctl(_PR_SET_NAME, f"zinfer-rank-{rank}".encode(), 0, 0, 0)
    if os.getppid() != launcher:  # it ended before
        os._exit(EXIT_STOPPED)
    if torch.cuda._is_in_bad_fork():
        raise RuntimeError("the launcher of the ranks has asked a GPU ([Note: ranks are forked])")


class _Ranks:
    """The ranks as processes of their launcher.

    Args:
        pids: by rank.

    Attributes:
        running: those of them that have not ended.
        exit_codes: of the others, in the order in which they ended; of those that a signal killed its number, negative.
    """

    def __init__(self, pids: Mapping[int, int]) -> None:
        self.running, self.exit_codes = dict(pids), dict[int, int]()

    @property
    def have_failed(self) -> bool:
        """Whether one has; failed rows are told by all, and end none."""
        return any(code not in (0, EXIT_ROWS_FAILED) for code in self.exit_codes.values())

    def look(self) -> None:
        """Note which have ended."""
        for rank, process in [*self.running.items()]:
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                self.exit_codes[rank] = os.waitstatus_to_exitcode(status)
                del self.running[rank]

    def send(self, number: int) -> None:
        """Send a signal to those that run, and to the processes that they have started."""
        for process in self.running.values():
            with suppress(ProcessLookupError):
                os.killpg(process, number)


def _watch(ranks: _Ranks, silence: SilenceWatch, received: Sequence[int]) -> None:
    """Wait until all ranks have ended; a signal, or a rank that fails, ends the others.

    Args:
        received: the signals that this process has got; others may be added.
    """
    look_s, kill_s, num_sent = 0.0, inf, 0
    while ranks.running:
        now_s = time.monotonic()
        if kill_s == inf and ranks.have_failed and not received:
            ranks.send(signal.SIGTERM)
            kill_s = now_s + _MOST_ENDING_S
        for number in received[num_sent:]:
            ranks.send(number)
            num_sent, kill_s = num_sent + 1, min(kill_s, now_s + _MOST_ENDING_S)
        if now_s > kill_s:
            ranks.send(signal.SIGKILL)
        if now_s > look_s:
            silence.look(ranks.running)
            look_s = now_s + LOOK_S
        time.sleep(_PAUSE_S)
        ranks.look()


def _say_how_ended(exit_codes: Mapping[int, int], file: Path, received: Sequence[int], kept: Callable[[], str]) -> int:
    """Say why ranks have ended early, if they have; returns the launcher's exit code."""
    if received:
        number = signal.Signals(received[0])
        say(f"{number.name}: stopped. {kept()}; {_AGAIN}.")
        return 128 + number
    failures = {rank: code for rank, code in exit_codes.items() if code not in (0, EXIT_ROWS_FAILED)}
    if not failures:
        return max(exit_codes.values())
    ending, first = first_cause(read_endings(file)), next(iter(failures))
    # The launcher ends the others by SIGTERM, and at last SIGKILL.
    killed = [rank for rank, code in failures.items() if code < 0 and (rank == first or code != -signal.SIGTERM)]
    is_silent = ending is not None and ending.silent_rank is not None  # and was killed for that
    if killed and not is_silent and (first in killed or ending is None or not ending.is_own):
        name = signal.Signals(-failures[killed[0]]).name
        say(f"error: rank {killed[0]} on {host_name()} was killed by {name}. {kept()}; {_AGAIN}")
        return EXIT_STOPPED
    if ending is not None:
        say(ending.told)
        return ending.exit_code
    say(f"error: rank {first} ended with exit code {failures[first]}")
    return failures[first]
