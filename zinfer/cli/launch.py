"""Starts the ranks of a command on this host, by torch's elastic launcher, and says how they ended."""

import ctypes
import logging
import os
import signal
import sys
from collections.abc import Callable
from math import prod
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Final, NoReturn
from uuid import uuid4

import typer

from zinfer.cli.ending import EXIT_ROWS_FAILED, EXIT_STOPPED, ending_signals, say
from zinfer.cli.rank_endings import LAUNCHER, first_cause, killing_silent_ranks, read_endings
from zinfer.errors import ConfigError
from zinfer.nvme.temporary_folder import is_in_use, temporary_folder
from zinfer.ranks.announcing import announce
from zinfer.ranks.environment import KEY, draw_key, host_name, is_several, num_started
from zinfer.ranks.sockets import LOOPBACK, SILENCE_S, reserve_port

if TYPE_CHECKING:
    from zinfer.config.parallel import Parallel

_PR_SET_PDEATHSIG: Final = 1
_MOST_RANKS: Final = 256
_AGAIN: Final = "run the same command again to go on"


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
    import torch

    if is_several() or (stated is None and parallel is None):
        return 1
    num_gpus = 0 if device == "cpu" else torch.cuda.device_count()
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
        return
    if stated is not None and stated != num_started():
        raise ConfigError(f"--ranks is {stated}, but {num_started()} processes were started; leave --ranks out")
    _end_with_launcher()
    announce(SILENCE_S)


def _end_with_launcher() -> None:
    """Let this process, a rank, get SIGTERM when its launcher ends.

    The kernel sends SIGCONT, which a stopped process hears too; SIGTERM would wait until somebody lets it go on.
    """
    if LAUNCHER not in os.environ:
        return
    launcher = os.getppid()

    def end_if_alone(number: int, frame: FrameType | None) -> None:
        if os.getppid() != launcher:
            os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGCONT, end_if_alone)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)
    if not is_in_use(Path(os.environ[LAUNCHER]).parent):  # it ended before
        sys.exit(EXIT_STOPPED)


def launch(num_ranks: int, kept: Callable[[], str]) -> NoReturn:
    """Run this command in several processes, and end as rank 0 does.

    Args:
        kept: returns a message on what the same command can resume from.
    """
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from zinfer.ranks.one_host import BACKEND, register_one_host

    logging.disable(logging.CRITICAL)  # the launcher reports each signal that it passes on
    register_one_host()
    os.environ.setdefault(KEY, draw_key())
    with temporary_folder("ranks") as folder, reserve_port(LOOPBACK) as reserved:
        endings = folder / "endings.jsonl"
        endings.touch()
        os.environ[LAUNCHER] = str(endings)
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # each wait that is over is a warning
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_ranks,
            run_id=uuid4().hex,
            rdzv_backend=BACKEND,
            rdzv_endpoint=f"{LOOPBACK}:{reserved.getsockname()[1]}",
            max_restarts=0,
            local_addr=LOOPBACK,
            logs_specs=DefaultLogsSpecs(log_dir=str(folder)),
            signals_to_handle=",".join(each.name for each in ending_signals()),
        )
        words = ["-m", "zinfer", *sys.argv[1:]]
        try:
            with killing_silent_ranks(endings, num_ranks, lambda: f"{kept()}; {_AGAIN}"):
                elastic_launch(config, sys.executable)(*words)
        except SignalException as stopped:
            text, exit_code = f"{stopped.sigval.name}: stopped. {kept()}; {_AGAIN}.", 128 + stopped.sigval
        except ChildFailedError as error:
            ending = first_cause(read_endings(endings))
            killed = {rank: -failure.exitcode for rank, failure in error.failures.items() if failure.exitcode < 0}
            first = next(iter(error.failures))  # the launcher ends the others by SIGTERM, and at last SIGKILL
            killed = {rank: number for rank, number in killed.items() if rank == first or number != signal.SIGTERM}
            is_silent = ending is not None and ending.silent_rank is not None  # and was killed for that
            if killed and not is_silent and (first in killed or ending is None or not ending.is_own):
                rank, number = next(iter(killed.items()))
                name = signal.Signals(number).name
                text = f"error: rank {rank} on {host_name()} was killed by {name}. {kept()}; {_AGAIN}"
                exit_code = EXIT_STOPPED
            elif ending is not None:
                text, exit_code = ending.told, ending.exit_code
            else:
                rank, failure = error.get_first_failure()
                text, exit_code = f"error: rank {rank} ended with exit code {failure.exitcode}", failure.exitcode
                if exit_code == EXIT_ROWS_FAILED:
                    raise typer.Exit(exit_code) from None
        else:
            raise typer.Exit
    say(text)
    raise typer.Exit(exit_code) from None
