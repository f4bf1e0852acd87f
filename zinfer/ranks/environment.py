"""What the environment says of this process among the others: torchrun's, SLURM's, Open MPI's and MPICH's variables."""

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from zlib import crc32

from zinfer.errors import ConfigError

_SIZE: Final = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_RANK: Final = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_LOCAL_RANK: Final = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
_NUM_LOCAL: Final = ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
_TORCHRUN_JOB: Final = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
_OTHER_JOB: Final = ("SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE")
_NUM_PORTS: Final = 8
_FIRST_PORT: Final = 20000
_LAST_PORT: Final = 32000  # below those that the kernel hands out
_MOST_PORT: Final = 65535


@dataclass(frozen=True)
class RankEnvironment:
    """This process among those that were started together.

    Attributes:
        rank: its number, from 0.
        size: the number of processes.
        local_rank: its number on this host; None: not stated.
        num_local: the processes on this host; None: not stated.
        host: the name of this host.
        address: of the host of rank 0.
        ports: of that host; rank 0 listens on the first that is free. 0: any.
        job: a name that the processes share.
    """

    rank: int
    size: int
    local_rank: int | None
    num_local: int | None
    host: str
    address: str
    ports: tuple[int, ...]
    job: str


def is_several() -> bool:
    """Whether the environment says that this process is one of several."""
    return num_started() > 1


def num_started() -> int:
    """Return the number of processes that were started together; 1 if this one runs alone.

    SLURM and MPI set their variables for a single process too, so theirs count only together with `MASTER_ADDR`.
    """
    return _number(_SIZE if "MASTER_ADDR" in os.environ else _SIZE[:1]) or 1


def num_in_step() -> int:
    """Return the number of processes that SLURM or MPI started together, also without `MASTER_ADDR`; 1 if none did."""
    return _number(_SIZE) or 1


def own_rank() -> int:
    """Return the rank of this process; 0 if it runs alone."""
    return _needed(_RANK) if is_several() else 0


def host_name() -> str:
    """Return the name of this host: SLURM's for it, if any, else its own."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def read_environment() -> RankEnvironment:
    """Return what the variables say of this process, which is one of several.

    Raises:
        ConfigError: variables are missing, or are not numbers in their range.
    """
    size, rank = _needed(_SIZE), _needed(_RANK)
    if rank >= size:
        raise ConfigError(f"rank {rank} is not one of {size} ranks, which count from 0; start them with torchrun")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise ConfigError(f"{name} is not set, which {size} processes need to find each other; start with torchrun")
    address, port = os.environ["MASTER_ADDR"], _needed(("MASTER_PORT",))
    if port > _MOST_PORT:
        raise ConfigError(f"MASTER_PORT is {port}, which is no port: they end with {_MOST_PORT}")
    names = _TORCHRUN_JOB if "RANK" in os.environ else _OTHER_JOB
    job = "/".join([str(size), *(os.environ.get(name, "") for name in names)])
    ports: tuple[int, ...] = (port,)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # the launcher itself listens on that port
        seeds = (f"{address}:{port}/{job}/{number}" for number in range(_NUM_PORTS))
        ports = tuple(_FIRST_PORT + crc32(seed.encode()) % (_LAST_PORT - _FIRST_PORT) for seed in seeds)
    return RankEnvironment(rank, size, _number(_LOCAL_RANK), _number(_NUM_LOCAL), host_name(), address, ports, job)


def _number(names: Sequence[str]) -> int | None:
    for name in names:
        if (text := os.environ.get(name)) is not None:
            if not text.isdecimal():
                raise ConfigError(f"{name} is {text!r}, not a number of processes, a rank or a port")
            return int(text)
    return None


def _needed(names: Sequence[str]) -> int:
    if (found := _number(names)) is None:
        raise ConfigError(f"{' or '.join(names)} is not set; start the processes with torchrun")
    return found
