"""What streaming asks of the other ranks, and the thread that gathers slabs while compute and copies go on.

[Note: one order for all ranks]
Collectives must be enqueued in the same order everywhere, and no rank can read a slab without its peers. So the uses
of blocks form one sequence for all ranks, by turns: the first rank that asks for a turn decides which block it is, and
every rank gathers that block and releases it, whether its own compute wants it or not. Equal sequences of uses make
equal predictions and prefetches on all ranks, so they need no other messages.

Where all that is divided lies in memory which every rank maps, each copies the others' ranges itself (`PeerSource`):
there are no turns then, and no rank waits for another.

[Note: ranks that divide layers, too]
Ranks may divide each layer, and share the bytes of their part with the ranks that hold the same part of other rows.
Those that divide layers wait for one another within a pass, in collectives. If the others' turns came in another order
among each of the parts, every rank could wait for one that waits for it. So all parts have one sequence of turns, and
ranks that divide layers together use the same turns for their pass: the first of them to come by decides whether a turn
that others have asked for is theirs too (`Turn.is_own`).
"""

import queue
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from zinfer.nvme.pool import start_thread
from zinfer.offload.block import Block
from zinfer.offload.partition import Partition
from zinfer.offload.slots import Slot
from zinfer.offload.source import Source
from zinfer.offload.stream import CopyStream, Event
from zinfer.offload.trace import Trace
from zinfer.offload.transfer import Target, Transfer


class Turn(NamedTuple):
    """The index of the block that all ranks use next, and whether this rank's compute uses it or only takes part."""

    block: int
    is_own: bool


class Shared(Protocol):
    """Memory of one size on each rank (uint8), which all of them map.

    Attributes:
        own: this rank's.
    """

    own: torch.Tensor

    def of(self, rank: int) -> torch.Tensor:
        """A rank's memory, by its place in the partition."""


class Ranks(Protocol):
    """The other ranks of a model. All of them call `share`, `allocate`, `gather` and `scatter` in the same order.

    ``partition`` tells which range of each slab this rank owns.
    """

    partition: Partition

    @property
    def can_share(self) -> bool:
        """Whether they can map memory of each other."""

    def share(self, nbytes: int) -> Shared:
        """Return memory on each rank's device, from which the others copy as they like."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return memory of a slot (uint8), which the other ranks may read while a slab is gathered into it."""

    def gather(self, slab: torch.Tensor) -> None:
        """Fill a slab (uint8, `Partition.gathered_bytes` long) with the ranges of all ranks, its own being in place.

        On a CUDA device it is enqueued on the current stream; after a failure the slab holds anything.
        """

    def scatter(self, part: torch.Tensor, slab: torch.Tensor | None, source: int) -> None:
        """Fill ``part`` (uint8, one range) with this rank's range of the slab of rank ``source``; None elsewhere."""

    def take_turn(self, index: int, *, expected: bool) -> Turn:
        """Return the block that all ranks use next: ``index``, or the one that another rank asked for first.

        Args:
            expected: whether ``index`` is the block that usually follows. If not, ranks in the middle of a pass go
                first, so that two passes do not alternate.
        """

    def fail(self, failure: BaseException) -> None:
        """Tell the other ranks that this one cannot go on."""

    def on_failure(self, call: Callable[[BaseException], None]) -> None:
        """Call from another thread, with an error that names the rank and the cause, once a rank has failed."""


class GatheredTransfer(Transfer):
    """A transfer of this rank's range into a slab, which is over once the slab is gathered from all ranks.

    Args:
        slab: the whole slab, `Partition.gathered_bytes` long (uint8).
    """

    def __init__(self, name: str, source: Source, target: Target, slab: torch.Tensor) -> None:
        super().__init__(name, source, target)
        self.slab = slab
        self._copied = threading.Event()

    def finish(self, sent: Event | None, at_s: float) -> None:
        """Note that the own range is copied."""
        self._sent = sent
        self._copied.set()

    def wait_copied(self) -> Event | None:
        """Wait for the copy of the own range to be enqueued; returns the event after it, None if that failed."""
        self._copied.wait()
        return self._sent

    def finish_gathered(self, gathered: Event | None) -> None:
        """Wake the waiter: the slab is full after ``gathered``. Later calls change nothing."""
        if not self.is_over:
            super().finish(gathered, time.perf_counter())


class GatherLane:
    """One thread that gathers slabs in the order in which their transfers began, the same on all ranks.

    After a failure, of this rank or of another, nothing is gathered any more: every transfer fails with that error.

    Args:
        ranks: the other ranks.
        stream: the stream of gathers, beside compute and copies.
        trace: records gathers, each with its wait for the other ranks' ranges.
    """

    def __init__(self, ranks: Ranks, stream: CopyStream, trace: Trace | None = None) -> None:
        self._ranks, self.stream, self._trace = ranks, stream, trace
        self.partition = ranks.partition
        self.take_turn = ranks.take_turn
        self._failure: BaseException | None = None
        self._lock = threading.Lock()
        self._open: list[GatheredTransfer] = []
        self._queue: queue.SimpleQueue[GatheredTransfer | None] = queue.SimpleQueue()
        self.gathered_bytes = 0
        ranks.on_failure(self._fail)
        self._thread = start_thread("zinfer-gather", self._run, self._lose)

    def begin(self, block: Block, source: Source, slot: Slot, stream: CopyStream) -> GatheredTransfer:
        """Return the transfer of this rank's range into a slot, queued to be gathered there; the caller submits it.

        Args:
            source: of the range.
            stream: of the lane that copies it.
        """
        target = Target(self.partition.own_range(slot.buffer, block.nbytes), stream, slot.reusable_after)
        slab = slot.buffer[: self.partition.gathered_bytes(block.nbytes)]
        transfer = GatheredTransfer(block.name, source, target, slab)
        with self._lock:
            failure = self._failure
            if failure is None:
                self._open.append(transfer)
                self._queue.put(transfer)
        if failure is not None:
            _give_up(transfer, failure)
        return transfer

    def close(self) -> None:
        """End the thread once the queued slabs are gathered; after a failure its last gather is left alone."""
        self._queue.put(None)
        while self._thread.is_alive() and self._failure is None:
            self._thread.join(timeout=0.1)

    def _run(self) -> None:
        while (transfer := self._queue.get()) is not None:
            gathered = self._gather(transfer)
            with self._lock:
                if self._failure is not None:
                    return
                self._open.remove(transfer)
            transfer.finish_gathered(gathered)

    def _gather(self, transfer: GatheredTransfer) -> Event:
        copied = transfer.wait_copied()
        if transfer.has_failed or copied is None:
            raise transfer.own_failure() or RuntimeError(f"{transfer.name} was not copied")
        self.stream.after(copied)
        begin = self.stream.mark() if self._trace is not None else None
        self.stream.run(lambda: self._ranks.gather(transfer.slab))
        self.gathered_bytes += transfer.slab.nbytes - transfer.slab.nbytes // self.partition.size
        gathered = self.stream.mark()
        if self._trace is not None and begin is not None:
            self._trace.add_between("gather", transfer.name, begin, gathered)
        return gathered

    def _lose(self, failure: BaseException) -> None:
        """Let the error be raised where transfers are waited for, on all ranks."""
        try:
            self._ranks.fail(failure)
        finally:
            self._fail(failure)

    def _fail(self, failure: BaseException) -> None:
        with self._lock:
            self._failure = failure = self._failure or failure
            several, self._open = self._open, []
        for transfer in several:
            _give_up(transfer, failure)


def _give_up(transfer: GatheredTransfer, failure: BaseException) -> None:
    transfer.fail(failure)
    transfer.finish_gathered(None)
