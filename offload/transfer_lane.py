"""Transfer lanes: each runs transfers in the order of submission, part by part through staging slots.

One thread of a lane starts to load parts as staging slots become free, so that the disk's queue never runs empty, even
between transfers. The other enqueues the copies of loaded parts.
"""

import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from zinfer.nvme.pool import end_process, start_thread
from zinfer.offload.staging import StagingRing, StagingSlot
from zinfer.offload.stream import CopyStream, Event
from zinfer.offload.trace import Trace
from zinfer.offload.transfer import Transfer


class LaneClosed(RuntimeError):
    """The lane was closed before the transfer was over."""


@dataclass(frozen=True)
class _Part:
    """A part whose loading has begun. ``number`` None ends the transfer."""

    transfer: Transfer
    number: int | None = None
    staging: StagingSlot | None = None
    loading: Sequence["Future[None]"] = ()
    begun_at_s: float = 0.0


class TransferLane:
    """Two threads that run transfers.

    Args:
        name: of the lane and its threads, "disk" or "host".
        stream: the stream of copies to the device.
        staging: the staging slots; other lanes may share them.
        trace: records loads and copies.
    """

    def __init__(self, name: str, stream: CopyStream, staging: StagingRing, trace: Trace | None = None) -> None:
        self._name = name
        self.stream = stream
        self._staging = staging
        self._trace = trace
        self._closing = False
        self._order = threading.Lock()  # nothing is queued after `_closing`
        self._transfers: queue.SimpleQueue[Transfer | None] = queue.SimpleQueue()
        self._parts: queue.SimpleQueue[_Part | Transfer | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        try:
            for role, work in (("load", self._load_transfers), ("send", self._send_parts)):
                self._threads.append(start_thread(f"zinfer-{name}-{role}", work, end_process))
        except BaseException:  # the thread limit is reached
            self.close()
            raise

    @property
    def slot_bytes(self) -> int:
        """Size of a staging slot, the maximum size of a staged part."""
        return self._staging.slot_bytes

    def submit(self, transfer: Transfer) -> None:
        """Queue a transfer and return. It keeps its own failure, such as `LaneClosed`; the lane goes on."""
        with self._order:
            if not self._closing:
                if transfer.source.staged:
                    self._transfers.put(transfer)
                else:  # there is nothing to load
                    self._parts.put(transfer)
                return
        self._gives_up(transfer)
        transfer.finish(None, time.perf_counter())

    def close(self) -> None:
        """Drop transfers not begun, wait for those under way, end the threads. May be called again."""
        with self._order:
            self._closing = True
            self._transfers.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def _load_transfers(self) -> None:
        while (transfer := self._transfers.get()) is not None:
            try:
                self._load_parts(transfer)
            except BaseException as failure:  # the thread must live: others wait for their transfers
                transfer.fail(failure)
            self._parts.put(_Part(transfer))
        self._parts.put(None)

    def _load_parts(self, transfer: Transfer) -> None:
        for number in range(transfer.source.num_parts):
            if self._gives_up(transfer):
                return
            staging: StagingSlot | None = None
            loading: Sequence[Future[None]] = ()
            begun_at_s = time.perf_counter()
            try:
                staging = self._staging.take()
                begun_at_s = time.perf_counter()
                loading = transfer.source.load(number, staging.memory)
            except BaseException as failure:  # raised where the transfer is waited for
                transfer.fail(failure)
            self._parts.put(_Part(transfer, number, staging, loading, begun_at_s))

    def _send_parts(self) -> None:
        last_loaded_s = 0.0
        while (part := self._parts.get()) is not None:
            if isinstance(part, Transfer):
                self._send_unstaged(part)
                continue
            if part.number is None:
                self._finish(part.transfer)
                continue
            # Every read must be over before the staging slot is reused, even after a failure.
            for read in part.loading:
                try:
                    read.result()
                except BaseException as failure:  # or it was cancelled
                    part.transfer.fail(failure)
            loaded_at_s = part.transfer.loaded_at_s = time.perf_counter()
            self._trace_load(part, max(part.begun_at_s, last_loaded_s), loaded_at_s)
            last_loaded_s = loaded_at_s
            self._send(part)

    def _send_unstaged(self, transfer: Transfer) -> None:
        try:
            for number in range(transfer.source.num_parts):
                if not self._gives_up(transfer):
                    self._send(_Part(transfer, number))
        except BaseException as failure:  # as above
            transfer.fail(failure)
        self._finish(transfer)

    def _gives_up(self, transfer: Transfer) -> bool:
        """Whether to drop the rest of a transfer."""
        if self._closing:
            transfer.fail(LaneClosed(f"the {self._name} lane was closed while {transfer.name} was on its way"))
        return transfer.has_failed

    def _trace_load(self, part: _Part, begun_at_s: float, loaded_at_s: float) -> None:
        """Trace a load from the end of the one before it, because a lane's reads overlap."""
        try:
            if self._trace is not None and part.staging is not None:
                self._trace.add(self._name, part.transfer.name, begun_at_s, loaded_at_s)
        except BaseException as failure:  # as above
            part.transfer.fail(failure)

    def _send(self, part: _Part) -> None:
        transfer, stream, number = part.transfer, part.transfer.target.stream, part.number
        assert number is not None
        try:
            if not transfer.has_failed:
                if number == 0 and transfer.target.reusable_after is not None:
                    stream.after(transfer.target.reusable_after)
                begin = stream.mark() if self._trace is not None else None
                transfer.source.send(
                    number, stream, transfer.target.memory, part.staging.memory if part.staging else None
                )
                if begin is not None and self._trace is not None:
                    lane = "host to device" if stream is self.stream else "host"  # a home in host memory is filled
                    self._trace.add_between(lane, transfer.name, begin, stream.mark())
        except BaseException as failure:  # as above
            transfer.fail(failure)
        if part.staging is not None:
            self._staging.put(part.staging, self._last_copy(transfer))

    def _finish(self, transfer: Transfer) -> None:
        transfer.finish(self._last_copy(transfer), time.perf_counter())

    def _last_copy(self, transfer: Transfer) -> Event | None:
        """Return the event after the copies so far, for a failed transfer too."""
        try:
            return transfer.target.stream.mark()
        except BaseException as failure:  # a device that cannot record an event copies no more either
            transfer.fail(failure)
            return None
