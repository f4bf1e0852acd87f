"""The group of processes of one job, from torchrun's, SLURM's or MPI's environment."""

import atexit
import itertools
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Final, TypeVar

import psutil
import torch
import torch.distributed as dist
from torch.distributed import FileStore, HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from zinfer.errors import ConfigError, RankError
from zinfer.nvme.temporary_folder import temporary_folder
from zinfer.ranks.announcing import announce
from zinfer.ranks.environment import RankEnvironment, draw_key, is_several, read_environment
from zinfer.ranks.numa import gpu_node, pin_to_node
from zinfer.ranks.rank_store import RankStore, StoredValues
from zinfer.ranks.roll_call import START_S, Roll, RollCall
from zinfer.ranks.roll_member import RollMember
from zinfer.ranks.sockets import LOOPBACK, SILENCE_S
from zinfer.ranks.values import from_bytes, to_bytes

_MESH_S: Final = timedelta(seconds=SILENCE_S)  # all are ready: connections take milliseconds
_NEWS_S: Final = 1.0
_LOOK_S: Final = 1.0
_PAUSE_S: Final = 0.02

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
        roll: the host names of all ranks, and where they make torch's group.
        roll_call: opens connections between the ranks.
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

    def connect(self) -> Connection | StoredValues:
        """Return a connection of its own to what rank 0 keeps for all: a wait on one holds up other calls on it."""
        return self.roll_call.open_store()


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
    why = "a rank ended before it told what it has found"

    def gone(reason: str | None) -> RankError:
        return RankError(f"{why}: rank 0 {'does not answer' if reason is None else 'is gone'}")

    store = RankStore(group.connect, f"values/{next(_num_gathered)}", gone, lambda: None)
    store.set(f"{group.rank}", to_bytes(value))
    found: list[_T] = []
    for rank in range(group.size):
        while not store.arrives(f"{rank}", _LOOK_S):
            if rank in group.roll_call.lost_ranks():
                raise RankError(f"{why}: rank {rank} on {group.hosts[rank]}")
        found.append(from_bytes(store.get(f"{rank}")))
    store.add("read", 1)
    while group.rank == 0 and store.add("read", 0) < group.size and not group.roll_call.lost_ranks():
        time.sleep(_PAUSE_S)  # it keeps the values
    store.close()
    return found


_joined: dict[str, RankGroup] = {}
_num_gathered: Final = itertools.count()


def _join(device: str, timeout: timedelta) -> RankGroup:
    own, roll_call = _find_the_others() if dist.is_initialized() else (read_environment(), announce(START_S))
    if device == "cuda" and own.local_rank is not None:
        _choose_gpu(own.local_rank)
    roll = roll_call.join(partial(_open_meeting, own)) if isinstance(roll_call, RollCall) else roll_call.join()
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


def _open_meeting(own: RankEnvironment, hosts: Sequence[str]) -> str:
    """Return where the ranks make torch's group, as long as this process, rank 0, lives.

    On one host that is a file that only this user can open. Torch's store on a port serves everybody who reaches it, so
    between hosts its keys begin with a secret; who can read the network, or lists the keys, may still learn it.
    """
    if len(set(hosts)) == 1:
        folder = _kept.enter_context(temporary_folder("ranks"))
        return f"{folder / 'meeting'}"
    try:
        store = TCPStore(own.address, 0, is_master=True, wait_for_workers=False, timeout=_MESH_S)
    except RuntimeError as error:
        why = str(error).splitlines()[0]
        raise RankError(
            f"rank 0 on {own.host} cannot be reached at MASTER_ADDR, which is {own.address}: {why}; set it to the host "
            "of rank 0"
        ) from error
    _kept.callback(lambda: store)
    return f"{store.port}:{draw_key()}"


def _meet(group: RankGroup) -> Store:
    """Return torch's store at the meeting."""
    meeting = group.roll.meeting
    if meeting.startswith("/"):
        return FileStore(meeting, -1)
    port, prefix = meeting.split(":")
    return PrefixStore(prefix, TCPStore(group.address, int(port), is_master=False, timeout=_MESH_S))


def _choose_interface(group: RankGroup) -> None:
    """Let gloo and NCCL use the interface that reaches the other hosts; the loopback if there are none."""
    is_alone = len(set(group.hosts)) == 1
    address = LOOPBACK if is_alone else group.roll_call.find_address(group.roll)
    for name, addresses in psutil.net_if_addrs().items():
        if address in (each.address for each in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            if is_alone:
                os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


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
        _init_torch_group(device, PrefixStore("group", _meet(group)), group.rank, group.size, timeout)
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
    port = torch.tensor([0 if first is None else first.port])
    if "cpu" not in dist.get_backend_config():
        port = port.cuda()
    dist.all_reduce(port)
    return own, first or RollMember(replace(own, ports=(int(port),)), START_S)


_kept: Final = ExitStack()
atexit.register(_kept.close)


def _leave() -> None:
    """Leave torch's group at exit."""
    if dist.is_initialized():
        dist.destroy_process_group()
