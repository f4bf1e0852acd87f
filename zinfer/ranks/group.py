"""The group of processes of one job, from torchrun's, SLURM's or MPI's environment."""

import atexit
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Final, TypeVar

import psutil
import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

from zinfer.errors import ConfigError, RankError
from zinfer.ranks.announcing import announce
from zinfer.ranks.environment import RankEnvironment, is_several, read_environment
from zinfer.ranks.numa import gpu_node, pin_to_node
from zinfer.ranks.roll_call import START_S, Roll, RollCall
from zinfer.ranks.roll_member import RollMember
from zinfer.ranks.sockets import SILENCE_S

_MESH_S: Final = timedelta(seconds=SILENCE_S)  # all are ready: connections take milliseconds
_NEWS_S: Final = 1.0

_T = TypeVar("_T")


@dataclass(frozen=True)
class RankGroup:
    """This process among those of a job.

    Attributes:
        rank: its number, from 0.
        size: the number of processes.
        local_rank: its number on this host.
        num_local: the processes on this host.
        address: of rank 0's host.
        roll: the host names of all ranks, and the port of the store that rank 0 keeps for all.
        roll_call: opens links between the ranks.
    """

    rank: int
    size: int
    local_rank: int
    num_local: int
    address: str
    roll: Roll
    roll_call: RollCall | RollMember

    @property
    def hosts(self) -> tuple[str, ...]:
        """The host names of all ranks."""
        return self.roll.hosts

    def connect(self) -> TCPStore:
        """Return a connection of its own to the store: a wait on one connection holds up other calls on it."""
        return TCPStore(self.address, self.roll.store_port, is_master=False, timeout=_MESH_S)


_thread = threading.local()


@contextmanager
def working_alone() -> Iterator[None]:
    """Let models that this thread opens meanwhile belong to this process alone, whoever was started with it."""
    _thread.is_alone = True
    try:
        yield
    finally:
        _thread.is_alone = False


def join_group(device: str, timeout: timedelta = _MESH_S) -> RankGroup | None:
    """Join the processes that were started together; None in a process, or a thread, that works alone.

    Reads `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`, as torchrun sets
    them; for all but the last two also SLURM's, Open MPI's and MPICH's variables.

    Args:
        device: "cuda" or "cpu"; a CUDA device is chosen by the local rank.
        timeout: of collectives in torch's group, if this call makes it.

    Raises:
        ConfigError: the variables are incomplete, or there are more processes than devices on this host.
        RankError: a process was lost before it joined, or did not join within five minutes.
    """
    if not is_several() or getattr(_thread, "is_alone", False):
        return None
    if device not in _joined:
        _joined[device] = _join(device, timeout)
    return _joined[device]


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


_joined: dict[str, RankGroup] = {}


def _join(device: str, timeout: timedelta) -> RankGroup:
    own, roll_call = _find_the_others() if dist.is_initialized() else (read_environment(), announce(START_S))
    if device == "cuda" and own.local_rank is not None:
        _choose_gpu(own.local_rank)
    store: Any = None
    if isinstance(roll_call, RollCall):
        store = _open_store(own)
        roll = roll_call.join(store.port)
    else:
        roll = roll_call.join()
    same_host = [rank for rank, host in enumerate(roll.hosts) if host == own.host]
    local_rank = same_host.index(own.rank) if own.local_rank is None else own.local_rank
    num_local = own.num_local or len(same_host)
    group = RankGroup(own.rank, own.size, local_rank, num_local, own.address, roll, roll_call)
    if device == "cuda" and own.local_rank is None:
        _choose_gpu(local_rank)
    if device == "cuda" and num_local > 1:  # one process alone computes with all processors
        pin_to_node(gpu_node(torch.device("cuda", local_rank)))
    if not dist.is_initialized():
        _choose_interface(group)
        _connect_all(group, device, timeout)
    return group


def _open_store(own: RankEnvironment) -> TCPStore:
    """Open the store of rank 0, which lives as long as the process."""
    try:
        store = TCPStore(own.address, 0, is_master=True, wait_for_workers=False, timeout=_MESH_S)
    except RuntimeError as error:
        why = str(error).splitlines()[0]
        raise RankError(
            f"rank 0 on {own.host} cannot be reached at MASTER_ADDR, which is {own.address}: {why}; set it to the host "
            "of rank 0"
        ) from error
    _kept.append(store)
    return store


def _choose_interface(group: RankGroup) -> None:
    """Let gloo use the interface that reaches the other hosts; that of the host's name may be a loopback."""
    if len(set(group.hosts)) == 1:
        return
    address = group.roll_call.find_address(group.roll)
    for name, addresses in psutil.net_if_addrs().items():
        if address in (each.address for each in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def _choose_gpu(local_rank: int) -> None:
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"local rank {local_rank} has no GPU: torch sees {torch.cuda.device_count()}; start as many processes "
            'as GPUs, or set zinfer.device to "cpu"'
        )
    torch.cuda.set_device(local_rank)
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")


def _connect_all(group: RankGroup, device: str, timeout: timedelta) -> None:
    """Make torch's group of all ranks."""
    try:
        store = PrefixStore("group", group.connect())
        _init_torch_group(device, store, group.rank, group.size, timeout)
        dist.all_reduce(torch.zeros(1))  # all are connected before one that refuses its settings leaves
    except (RuntimeError, TimeoutError) as error:
        here = f"rank {group.rank} on {group.hosts[group.rank]}"
        why = group.roll_call.find_lost(_NEWS_S) or str(error).splitlines()[0]
        raise RankError(f"{here} could not connect to the other ranks: {why}") from error


def make_group_of_one(device: str, timeout: timedelta) -> None:
    """Make torch's group for a process that was started alone."""
    _init_torch_group(device, HashStore(), 0, 1, timeout)


def _init_torch_group(device: str, store: Any, rank: int, size: int, timeout: timedelta) -> None:
    # Another backend for each kind of tensor: control messages stay on the host.
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    atexit.register(_leave)


def _find_the_others() -> tuple[RankEnvironment, RollCall | RollMember]:
    """Call the roll of a group that the program made itself: its port is torch's, so rank 0 listens on another."""
    own = replace(read_environment(), ports=(0,))
    first = RollCall(own, START_S) if own.rank == 0 else None
    ports: list[Any] = [None] * own.size
    dist.all_gather_object(ports, 0 if first is None else first.port)
    return own, first or RollMember(replace(own, ports=(ports[0],)), START_S)


_kept: list[TCPStore] = []


def _leave() -> None:
    """Leave torch's group at exit."""
    if dist.is_initialized():
        dist.destroy_process_group()
