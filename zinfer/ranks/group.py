"""The group of processes of one job, from torchrun's or SLURM's environment."""

import atexit
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from zinfer.errors import ConfigError, RankError
from zinfer.ranks.numa import gpu_node, pin_to_node

_JOIN_S: Final = 300  # the others may still import torch
_SIZE: Final = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
_RANK: Final = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
_LOCAL_RANK: Final = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")
_NUM_LOCAL: Final = ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE")

_T = TypeVar("_T")


@dataclass(frozen=True)
class RankGroup:
    """This process among those of a job.

    Attributes:
        rank: its number, from 0.
        size: the number of processes.
        local_rank: its number on this host.
        num_local: the processes on this host.
        hosts: the host names of all ranks.
        address, port: of the store that rank 0 keeps for all.
    """

    rank: int
    size: int
    local_rank: int
    num_local: int
    hosts: tuple[str, ...]
    address: str
    port: int

    def connect(self) -> TCPStore:
        """Return a connection of its own to the store: a wait on one connection holds up other calls on it."""
        return TCPStore(self.address, self.port, is_master=False, timeout=timedelta(seconds=_JOIN_S))


def is_several() -> bool:
    """Whether the environment says that this process is one of several.

    SLURM and MPI set their variables for a single process too, so theirs count only together with `MASTER_ADDR`.
    """
    names = _SIZE if "MASTER_ADDR" in os.environ else _SIZE[:1]
    return _variable(names, default=1) > 1


def is_first() -> bool:
    """Whether this process runs alone or is rank 0."""
    return not is_several() or _variable(_RANK) == 0


def join_group(device: str) -> RankGroup | None:
    """Join the processes that were started together; None in a process that runs alone.

    Reads `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`, as torchrun sets
    them; for all but the last two also SLURM's and Open MPI's variables.

    Args:
        device: "cuda" or "cpu"; a CUDA device is chosen by the local rank.

    Raises:
        ConfigError: the variables are incomplete, or there are more processes than devices on this host.
        RankError: the other processes did not join within five minutes.
    """
    return _join(device) if is_several() else None


def all_values(group: RankGroup, value: _T) -> list[_T]:
    """Return every rank's value, by rank, once all of them are done with their models; all ranks call it.

    Raises:
        RankError: a rank has ended.
    """
    found: list[Any] = [None] * group.size
    try:
        dist.all_gather_object(found, value)
    except RuntimeError as error:
        raise RankError(f"a rank ended before it told what it has found: {str(error).splitlines()[0]}") from error
    return found


@cache
def _join(device: str) -> RankGroup:
    size, rank = _variable(_SIZE), _variable(_RANK)
    local_rank, num_local = _variable(_LOCAL_RANK, default=0), _variable(_NUM_LOCAL, default=size)
    if device == "cuda":
        if local_rank >= torch.cuda.device_count():
            raise ConfigError(
                f"local rank {local_rank} has no GPU: torch sees {torch.cuda.device_count()}; start as many processes "
                'as GPUs, or set zinfer.device to "cpu"'
            )
        torch.cuda.set_device(local_rank)
        if num_local > 1:  # one process alone computes with all processors
            pin_to_node(gpu_node(torch.device("cuda", local_rank)))
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not dist.is_initialized() and name not in os.environ:
            raise ConfigError(f"{name} is not set, which {size} processes need to find each other; start with torchrun")
    try:
        if not dist.is_initialized():
            # Another backend for each kind of tensor: control messages stay on the host.
            backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
            dist.init_process_group(backend, rank=rank, world_size=size, timeout=timedelta(seconds=_JOIN_S))
            atexit.register(_leave)
        own: Any = None
        if rank == 0:
            own = TCPStore(_address(), 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=_JOIN_S))
            _kept.append(own)
        found: list[Any] = [None] * size
        dist.all_gather_object(found, (socket.gethostname(), 0 if own is None else own.port))
    except (RuntimeError, TimeoutError) as error:
        raise RankError(
            f"rank {rank} of {size} on {socket.gethostname()} could not join the others: {error}"
        ) from error
    hosts = tuple(host for host, _ in found)
    return RankGroup(rank, size, local_rank, num_local, hosts, _address(), found[0][1])


_kept: list[TCPStore] = []
"""The store of rank 0, which lives as long as the process."""


def _leave() -> None:
    """Leave torch's group at exit."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _address() -> str:
    return os.environ.get("MASTER_ADDR", "127.0.0.1")


def _variable(names: Sequence[str], default: int | None = None) -> int:
    for name in names:
        if (text := os.environ.get(name)) is not None:
            if not text.isdigit():
                raise ConfigError(f"{name} is {text!r}, not a number of processes or a rank")
            return int(text)
    if default is None:
        raise ConfigError(f"{' or '.join(names)} is not set; start the processes with torchrun")
    return default
