"""The ranks of one model: the exchange of slabs, the turns, and the news of failures."""

import itertools
import pickle
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import DistStoreError, PrefixStore, Store  # type: ignore[attr-defined]

from zinfer.errors import RankError
from zinfer.ranks.group import RankGroup

_BEAT_S: Final = 2
_SILENCE_S: Final = 45  # of a rank that counts as lost: a process that is alive beats even while it computes
_PATIENCE_S: Final = 1.0  # for a rank in the middle of a pass to ask for its next block
_KEPT_TURNS: Final = 1000  # more than any rank is behind another
_LEAVE_S: Final = 30
_LEAST_PAUSE_S: Final = 20e-6
_MOST_PAUSE_S: Final = 1e-3
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # before torch 2.13
_numbers = itertools.count()
_open: "weakref.WeakSet[ModelRanks]" = weakref.WeakSet()
_T = TypeVar("_T")


class ModelRanks:
    """Implements `zinfer.offload.ranks.Ranks` over torch.distributed; made on all ranks in the same order.

    Args:
        group: the processes.
        device: of the slabs; CUDA slabs are gathered by NCCL, others by gloo.
    """

    def __init__(self, group: RankGroup, device: torch.device) -> None:
        self.group = group
        self.partition = group.partition
        prefix = f"model/{next(_numbers)}"
        self._store = PrefixStore(prefix, group.connect())
        self._waiting = PrefixStore(prefix, group.connect())  # for the thread of `wait_for_turn`
        self._news = PrefixStore(prefix, group.connect())  # for the thread that watches
        self._on_cuda = device.type == "cuda"
        self._num_exchanges = 0
        self.turn = 0
        self._failure: BaseException | None = None
        self._callbacks: list[Callable[[BaseException], None]] = []
        self._over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="zinfer-ranks", daemon=True)
        self._watcher.start()
        _open.add(self)
        try:
            self.exchange(True)  # nothing ends a wait in `new_group` for a rank that has failed before
            self._slabs: Any = dist.new_group(
                backend="nccl" if self._on_cuda else "gloo", timeout=timedelta(seconds=_SILENCE_S * 20)
            )
        except BaseException as failure:
            self.leave_after(None, failure, None)
            raise

    def gather(self, slab: torch.Tensor) -> None:
        """As `Ranks.gather`."""
        each = slab.nbytes // self.group.size
        own = slab[self.group.rank * each : (self.group.rank + 1) * each]
        self._await(_all_gather(slab, own, group=self._slabs, async_op=True))

    def scatter(self, part: torch.Tensor, slab: torch.Tensor | None, source: int) -> None:
        """As `Ranks.scatter`."""
        ranges = None if slab is None else list(torch.chunk(slab, self.group.size))
        self._await(dist.scatter(part, ranges, src=source, group=self._slabs, async_op=True))

    def exchange(self, value: _T) -> list[_T]:
        """Return every rank's value, by rank. All ranks call it in the same order, with what pickle takes.

        Raises:
            RankError: another rank failed.
        """
        name, self._num_exchanges = f"exchange/{self._num_exchanges}", self._num_exchanges + 1
        self._store.set(f"{name}/{self.group.rank}", pickle.dumps(value))  # type: ignore[arg-type]
        found: list[_T] = []
        for rank in range(self.group.size):
            while not _arrives(self._store, f"{name}/{rank}", _BEAT_S):
                self.check()
            found.append(pickle.loads(self._store.get(f"{name}/{rank}")))
        return found

    def first_alone(self, work: Callable[[], _T]) -> _T:
        """Run work on rank 0 and then on the others, which find what it has left on disk.

        Raises:
            RankError: another rank failed.
        """
        if self.group.rank == 0:
            done = work()
            self.exchange(True)
            return done
        self.exchange(True)
        return work()

    def check(self) -> None:
        """Raise the error of the rank that has failed, if any."""
        if self._failure is not None:
            raise self._failure

    def _await(self, work: Any) -> None:
        """Wait for a collective on the host, unless a rank fails; on a CUDA device only the current stream waits."""
        pause_s = _LEAST_PAUSE_S
        while not self._on_cuda and not work.is_completed():
            self.check()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MOST_PAUSE_S)
        work.wait()

    def take_turn(self, index: int, *, expected: bool) -> int:
        """As `Ranks.take_turn`.

        Raises:
            RankError: another rank failed.
        """
        key = f"turn/{self.turn}"
        try:
            if not expected:
                _arrives(self._store, key, _PATIENCE_S)
            taken = int(self._store.compare_set(key, "", str(index)))
            if self.group.rank == 0 and self.turn >= _KEPT_TURNS:
                self._store.delete_key(f"turn/{self.turn - _KEPT_TURNS}")
        except RuntimeError as error:
            raise self._failure or RankError(f"{self._named(0)} is gone, and with it the turns: {error}") from error
        self.check()
        self.turn += 1
        return taken

    def wait_for_turn(self, timeout_s: float) -> tuple[int, int] | None:
        """Wait until a rank asks for the next block; returns the turn's number and the block, None after the timeout.

        Called by another thread than `take_turn`.
        """
        turn = self.turn
        key = f"turn/{turn}"
        if not _arrives(self._waiting, key, timeout_s):
            return None
        return turn, int(self._waiting.get(key))

    def say_done(self) -> None:
        """Tell the other ranks that this one asks for no more blocks."""
        self._store.set(f"done/{self.group.rank}", "1")

    def all_are_done(self) -> bool:
        """Whether no rank asks for another block."""
        return bool(self._store.check([f"done/{rank}" for rank in range(self.group.size)]))

    @property
    def failure(self) -> BaseException | None:
        """Why the ranks cannot go on; None while they can."""
        return self._failure

    def fail(self, failure: BaseException) -> None:
        """As `Ranks.fail`; only the first failure of all ranks is told."""
        if self._failure is None:
            text = f"{self._named(self.group.rank)}: {type(failure).__name__}: {failure}"
            with suppress(RuntimeError):  # rank 0 is gone with the store: the others know that
                self._news.compare_set("failed", "", text)
            self._note(failure)

    def on_failure(self, call: Callable[[BaseException], None]) -> None:
        """As `Ranks.on_failure`."""
        self._callbacks.append(call)

    def leave_after(self, kind: object, failure: BaseException | None, trace: object) -> None:
        """Tell the others of the failure and leave; an exit callback of `contextlib.ExitStack.push`."""
        if failure is not None:
            self.fail(failure)
        self.close()

    def close(self) -> None:
        """Leave. Rank 0, which keeps the store, waits until the others have left, unless a rank has failed."""
        _open.discard(self)
        self._over.set()
        self._watcher.join()
        if self._failure is not None:
            return
        num_left = self._store.add("left", 1)
        until_s = time.monotonic() + _LEAVE_S
        while self.group.rank == 0 and num_left < self.group.size and time.monotonic() < until_s:
            time.sleep(0.01)
            num_left = self._store.add("left", 0)

    def _watch(self) -> None:
        """Beat, and listen for the others' beats and failures."""
        size, rank = self.group.size, self.group.rank
        heard = [(0, time.monotonic())] * size
        try:
            while not self._over.wait(_BEAT_S):
                self._news.add(f"beat/{rank}", 1)
                if self._news.check(["failed"]):
                    self._note(RankError(self._news.get("failed").decode()))
                    return
                now_s = time.monotonic()
                beats = [self._news.add(f"beat/{each}", 0) for each in range(size)]
                heard = [then if then[0] == beat else (beat, now_s) for then, beat in zip(heard, beats, strict=True)]
                silent = [each for each, (_, at_s) in enumerate(heard) if now_s - at_s > _SILENCE_S]
                if silent:
                    self._note(RankError(f"{self._named(silent[0])} has not answered for {_SILENCE_S} s"))
                    return
        except RuntimeError as error:
            self._note(RankError(f"{self._named(0)} is gone, and with it the store of all ranks: {error}"))

    def _named(self, rank: int) -> str:
        return f"rank {rank} on {self.group.hosts[rank]}"

    def _note(self, failure: BaseException) -> None:
        self._failure = self._failure or failure
        for call in self._callbacks:
            call(failure)


def fail_models(failure: BaseException) -> None:
    """Fail every model of this process, also while it loads: all ranks' waits for its blocks raise. Thread-safe."""
    for ranks in list(_open):
        ranks.fail(failure)


def _arrives(store: Store, key: str, timeout_s: float) -> bool:
    """Whether a key is set within the timeout."""
    try:
        store.wait([key], timedelta(seconds=timeout_s))
    except DistStoreError:  # the timeout is over
        return False
    return True
