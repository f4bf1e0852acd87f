"""The ranks of one model: the exchange of slabs and values, and the turns.

Slabs are those of a sub-group of the ranks, which share one copy of the bytes of a model, or of a part of it (`zero` of
the mesh). Turns are those of all ranks that share or divide the same layers (`zinfer.offload.ranks`). Values are
exchanged, and beats and failures heard, among all ranks of the job: one that fails ends the others, whether or not they
share slabs with it.
"""

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist

from zinfer.errors import RankError
from zinfer.nvme.pool import Pool, call_all
from zinfer.offload.partition import Partition
from zinfer.offload.ranks import Shared, Turn
from zinfer.ranks.communicator import Communicator, TorchCommunicator
from zinfer.ranks.group import RankGroup
from zinfer.ranks.mesh import DIVIDING, Mesh, Mode
from zinfer.ranks.open_models import add_model, remove_model
from zinfer.ranks.peer_communicator import PeerCommunicator
from zinfer.ranks.peer_memory import Card, PeerMemory, can_copy
from zinfer.ranks.progress import Progress
from zinfer.ranks.rank_store import growing_pauses
from zinfer.ranks.rank_watch import BEAT_S, RankWatch
from zinfer.ranks.sockets import SILENCE_S
from zinfer.ranks.turns import Turns
from zinfer.ranks.values import from_bytes, to_bytes

_MOST_PAUSE_S: Final = 1e-3
_LEAVE_PAUSE_S: Final = 0.02
_numbers = itertools.count()
_T = TypeVar("_T")


class ModelRanks:
    """Implements `zinfer.offload.ranks.Ranks` over torch.distributed; made on all ranks in the same order.

    Args:
        group: the processes.
        device: of the slabs. GPUs of one host copy them from each other if they can; else NCCL gathers them. Slabs in
            host memory are gathered by gloo.
        mesh: how they are arranged; by default all of them share slabs.

    Attributes:
        mesh: how the processes are arranged.
        members: the ranks that share slabs with this one, itself among them.
        partition: this rank's place among the members.
        turns: of the ranks that share or divide the same layers.
        progress: of the passes on this rank.
    """

    def __init__(self, group: RankGroup, device: torch.device, mesh: Mesh | None = None) -> None:
        self.group = group
        self.mesh = mesh or Mesh(zero=group.size)
        self.mesh.check(group.size)
        self.members = self.mesh.ranks_along("zero", group.rank)
        self.partition = Partition(self.members.index(group.rank), len(self.members))
        self._device = device
        self.progress = Progress(sees_waits=device.type != "cuda")
        self._communicators: dict[tuple[Mode, ...], Communicator] = {}
        self._num_exchanges: Counter[Sequence[int]] = Counter()
        self._watch = RankWatch(group, f"model/{next(_numbers)}")
        self._watch.on_failure(self._give_up)
        # A connection serves one thread: that of the model, and that of `Turns.wait_for_next`.
        self._store, self._coming = self._watch.connect(), self._watch.connect()
        self.turns = Turns(self.mesh, group.rank, self._store, self._coming, self.check)
        try:
            add_model(self)
            self._slabs = self.communicator(("zero",))
        except BaseException as failure:
            self.leave_after(None, failure, None)
            raise

    @property
    def failure(self) -> BaseException | None:
        """Why the ranks cannot go on; None while they can."""
        return self._watch.failure

    def communicator(self, modes: tuple[Mode, ...]) -> Communicator:
        """Return the communicator of this rank's sub-group in some modes. All ranks of the job call it together."""
        if modes not in self._communicators:
            self._communicators[modes] = self._open_communicator(modes)
        return self._communicators[modes]

    def allocate(self, nbytes: int) -> torch.Tensor:
        """As `Ranks.allocate`."""
        return self._slabs.allocate(nbytes)

    @property
    def can_share(self) -> bool:
        """As `Ranks.can_share`."""
        return self._slabs.can_share

    def share(self, nbytes: int) -> Shared:
        """As `Ranks.share`."""
        return self._slabs.share(nbytes)

    def gather(self, slab: torch.Tensor) -> None:
        """As `Ranks.gather`."""
        self._slabs.gather(slab)

    def scatter(self, part: torch.Tensor, slab: torch.Tensor | None, source: int) -> None:
        """As `Ranks.scatter`."""
        self._slabs.scatter(part, slab, source)

    def exchange(self, value: _T, members: Sequence[int] = ()) -> list[_T]:
        """Return every rank's value, by rank. All ranks call it in the same order, with what `to_bytes` takes.

        Args:
            value: this rank's.
            members: the ranks that call it, this one among them; by default all of the job.

        Raises:
            RankError: another rank failed.
        """
        members = tuple(members) or tuple(range(self.group.size))
        number = self._num_exchanges[members]
        self._num_exchanges[members] += 1
        among = "exchange/" + "-".join(map(str, members))
        self._store.set(f"{among}/{number}/{self.group.rank}", to_bytes(value))
        found: list[_T] = []
        for rank in members:
            with self.progress.waiting():
                while not self._store.arrives(f"{among}/{number}/{rank}", BEAT_S):
                    self.check()
            found.append(from_bytes(self._store.get(f"{among}/{number}/{rank}")))
        if number:  # all have read the values before these
            self._store.delete(f"{among}/{number - 1}/{self.group.rank}")
        return found

    def first_alone(self, work: Callable[[], _T]) -> _T:
        """Run work on one rank and then on the others, which find what it has left on disk.

        Where ranks divide layers, each of the first group works first, for its own part. One whose work fails either
        tells the failure, or first exchanges False.

        Raises:
            RankError: another rank failed.
        """
        places = self.mesh.coordinates(self.group.rank).items()
        if all(place == 0 for mode, place in places if mode not in DIVIDING):
            done = work()
            self._exchange_success()
            return done
        self._exchange_success()
        return work()

    def _exchange_success(self) -> None:
        while not all(self.exchange(True)):
            pass  # the rank that failed exchanges nothing more; it tells why, and `exchange` raises that

    def check(self) -> None:
        """Raise the error of the rank that has failed, if any."""
        self._watch.check()

    def take_turn(self, index: int, *, expected: bool) -> Turn:
        """As `Ranks.take_turn`; raises RankError as `Turns.take`."""
        return self.turns.take(index, expected=expected)

    def fail(self, failure: BaseException) -> None:
        """As `Ranks.fail`; only the first failure of all ranks is told. May be called by any thread."""
        self._watch.fail(failure)

    def name_of(self, rank: int) -> str:
        """Return a rank's name for messages: its number and host."""
        return self._watch.name_of(rank)

    def find_cause(self, error: BaseException) -> BaseException:
        """Return why a connection to another rank has ended: the failure that a rank tells within some seconds."""
        return self.failure or self._watch.broken(error)

    def on_failure(self, call: Callable[[BaseException], None]) -> None:
        """As `Ranks.on_failure`."""
        self._watch.on_failure(call)

    def leave_after(self, kind: object, failure: BaseException | None, trace: object) -> None:
        """Tell the others of the failure and leave; an exit callback of `contextlib.ExitStack.push`."""
        if failure is not None:
            self.fail(failure)
        self.close()

    def wait_for_others(self, *, all_wait: bool = False) -> None:
        """Wait until no rank asks for another block, or one has failed: on rank 0, which keeps the store, or on all."""
        every = [f"done/{rank}" for rank in range(self.group.size)]
        waits = all_wait or self.group.rank == 0
        while waits and self.failure is None and not self._store.has(*every):
            time.sleep(_LEAVE_PAUSE_S)

    def close(self) -> None:
        """Leave. Rank 0 waits until the others have left, unless a rank has failed."""
        remove_model(self)
        try:  # those that share slabs hear of a failure by their gathers
            self._watch.leave(self._store, all_hear=self.partition.size == self.group.size)
        finally:
            for each in self._communicators.values():
                each.close()
        if self.failure is None:
            self._store.close()
            self._coming.close()

    def _open_communicator(self, modes: tuple[Mode, ...]) -> Communicator:
        members = self.mesh.ranks_in(modes, self.group.rank)
        partition = Partition(members.index(self.group.rank), len(members))
        copies = self._can_copy(members)
        own = self.open_group(self.mesh.groups_in(modes), "gloo" if copies else None)
        if copies:
            return PeerCommunicator(PeerMemory(partition, self._device, own))
        is_mapped = self._device.type == "cpu" and len({self.group.hosts[rank] for rank in members}) == 1
        return TorchCommunicator(
            own,
            members,
            partition,
            self._device,
            self.check,
            self.wait_for,
            is_mapped,
            partial(self.exchange, members=members),
        )

    def open_group(self, groups: Iterable[tuple[int, ...]], backend: str | None = None) -> Any:
        """Return torch's process group of this rank, one of several that all ranks of the job make together.

        Args:
            groups: the ranks of each; this rank is in one of them at the most.
            backend: by default the one for tensors on the model's device.

        Raises:
            RankError: a rank failed.
        """
        chosen = backend or ("nccl" if self._device.type == "cuda" else "gloo")

        # In a thread that is left behind if a rank fails: nothing ends its wait for it.
        def connect() -> Any:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            own: Any = None
            for each in groups:
                made = dist.new_group(list(each), backend=chosen, timeout=timedelta(seconds=20 * SILENCE_S))
                own = made if self.group.rank in each else own
            return own

        calls = Pool(1, "zinfer-connect")
        pauses, connected = growing_pauses(_MOST_PAUSE_S), calls.submit(connect)
        while not connected.done():
            self.check()
            time.sleep(next(pauses))
        calls.close()
        try:
            return connected.result()
        except RuntimeError as error:
            raise self._watch.broken(error) from error

    def wait_for(self, work: Any) -> None:
        """Wait for a collective on the host, unless a rank fails; on a CUDA device only the current stream waits.

        Raises:
            RankError: a rank failed.
        """
        pauses = growing_pauses(_MOST_PAUSE_S)
        try:
            with self.progress.waiting():
                while self._device.type != "cuda" and not work.is_completed():
                    self.check()
                    time.sleep(next(pauses))
                work.wait()
        except RankError:
            raise
        except RuntimeError as error:
            raise self._watch.broken(error) from error

    def _can_copy(self, members: Sequence[int]) -> bool:
        """Whether the members of every sub-group can copy from each other, by their GPUs."""
        if self._device.type != "cuda":
            self.exchange(True)
            return False
        every = self.exchange(Card.of(self.group.hosts[self.group.rank], self._device))
        can = can_copy(members.index(self.group.rank), [every[rank] for rank in members])
        return all(self.exchange(can)) and len(members) > 1

    def _give_up(self, failure: BaseException) -> None:
        """Let the device come to its end; the failure is set, so what communicators give from now on is not used."""
        call_all([each.give_up for each in [*self._communicators.values()]])
