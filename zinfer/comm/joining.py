"""Connects the processes of a DeepSpeed script, which zinfer's engines then find connected."""

import os
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist

from zinfer.errors import ConfigError, RankError
from zinfer.ranks.environment import num_in_step, num_started, own_local_rank, own_rank
from zinfer.ranks.group import join_group, make_group_of_one

_DEVICES: Final = {"nccl": "cuda", "gloo": "cpu"}
_PORT: Final = 29500


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = _PORT,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: object = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Connect the processes that were started together, as DeepSpeed's `init_distributed` does.

    Engines need no such call: they connect the processes themselves. A process that was started alone becomes the only
    one of a group. Where SLURM or MPI started several, torchrun's variables are set, such as `LOCAL_RANK`. Does nothing
    if the processes are connected.

    Args:
        dist_backend: "nccl", for GPUs, or "gloo"; by default as there are GPUs. Host tensors use gloo with both.
        auto_mpi_discovery, verbose, config: for DeepSpeed's sake; without effect.
        distributed_port: on which ranks find each other unless `MASTER_PORT` is set.
        timeout: of collectives; by default `DEEPSPEED_TIMEOUT` minutes, or ten.
        init_method: "env://" or None.
        dist_init_required: False: refuse if the processes are not connected.
        rank, world_size: those of the environment, if given.

    Raises:
        ConfigError: an argument differs from the environment or has no meaning here, or the environment is incomplete.
        RankError: a process was lost before it joined, or did not join within five minutes.
    """
    if dist.is_initialized():
        return
    if dist_init_required is False:
        raise ConfigError("dist_init_required is False, but the processes are not connected; leave it out to do so now")
    if dist_backend not in (None, *_DEVICES):
        raise ConfigError(f"dist_backend is {dist_backend!r}; give one of {', '.join(_DEVICES)}, or leave it out")
    _check_environment(init_method, rank, world_size)
    if num_started() > 1:
        os.environ.setdefault("MASTER_PORT", str(distributed_port))
    _connect(_DEVICES[dist_backend or ("nccl" if torch.cuda.is_available() else "gloo")], timeout or _default_timeout())


def get_local_rank() -> int:
    """Return this process's number on its host, as `LOCAL_RANK` states it; 0 if it was started alone."""
    return own_local_rank()


def _check_environment(init_method: str | None, rank: int, world_size: int) -> None:
    """Raise ConfigError where what is given differs from what the environment says."""
    if init_method not in (None, "env://"):
        raise ConfigError(
            f"init_method is {init_method!r}; leave it out, and set MASTER_ADDR and MASTER_PORT, or start with torchrun"
        )
    if num_in_step() > 1 and num_started() == 1:
        raise ConfigError(
            f"MASTER_ADDR is not set, which {num_in_step()} processes need to find each other; set it to rank 0's host"
        )
    for name, given, stated in (("rank", rank, own_rank()), ("world_size", world_size, num_started())):
        if given not in (-1, stated):
            raise ConfigError(
                f"{name} is {given}, but {stated} by the environment; leave it out, or set RANK and WORLD_SIZE"
            )


def _connect(device: str, timeout: timedelta) -> None:
    """Make torch's group of all processes, and set the variables that say which of them this one is."""
    group = join_group(device, timeout)
    if group is None:
        make_group_of_one(device, timeout)
        return
    if not dist.is_initialized():
        raise RankError("the processes were connected before, which they can be once; leave out destroy_process_group")
    own = {"RANK": group.rank, "WORLD_SIZE": group.size, "LOCAL_RANK": group.local_rank}
    for name, number in (own | {"LOCAL_WORLD_SIZE": group.num_local}).items():
        os.environ.setdefault(name, str(number))


def _default_timeout() -> timedelta:
    text = os.environ.get("DEEPSPEED_TIMEOUT", "10")
    if not text.isdecimal() or int(text) == 0:
        raise ConfigError(f"DEEPSPEED_TIMEOUT is {text!r}, not a number of minutes")
    return timedelta(minutes=int(text))
