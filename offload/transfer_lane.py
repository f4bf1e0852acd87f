"""Lanes: each carries moves, in the order of submission, part by part through staging slots.

One thread of a lane begins the loading of parts as staging slots come free, so that the disk always has requests
waiting, also across the borders of moves; the other enqueues the copies of parts that have arrived.
"""

import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from zinfer.offload.staging import StagingRing, StagingSlot
from zinfer.offload.stream import CopyStream, Event
from zinfer.offload.trace import Trace
from zinfer.offload.transfer import Transfer


class LaneClosed(RuntimeError):
    """The lane was closed before the move was over."""


@dataclass(frozen=True)
class _Part:
    """A part whose loading has begun. ``number`` None closes the move."""

    move: Transfer
    number: int | None = None
    staging: StagingSlot | None = None
    loading: Sequence["Future[None]"] = ()
    begun_at_s: float = 0.0


class TransferLane:
    """Two threads that carry moves.

    Args:
        name: of the lane and its threads, "disk" or "host".
        stream: where the copies to the device go.
        staging: the staging slots that parts pass through; other lanes may share them.
        trace: where loads and copies are noted.
    """

    def __init__(self, name: str, stream: CopyStream, staging: StagingRing, trace: Trace | None = None) -> None:
        self._name = name
        self.stream = stream
        self._staging = staging
        self._trace = trace
        self._closing = False
        self._order = threading.Lock()  # nothing is submitted to the threads after `_closing`
        self._moves: queue.SimpleQueue[Transfer | None] = queue.SimpleQueue()
        self._parts: queue.SimpleQueue[_Part | Transfer | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        try:
            for role, work in (("load", self._load_moves), ("send", self._send_parts)):
                thread = threading.Thread(target=work, name=f"zinfer-{name}-{role}", daemon=True)
                thread.start()
                self._threads.append(thread)
        except BaseException:  # the system gives no more threads
            self.close()
            raise

    @property
    def slot_bytes(self) -> int:
        """Size of a staging slot: the most that a staged part may hold."""
        return self._staging.slot_bytes

    def submit(self, move: Transfer) -> None:
        """Have the move run; returns at once. A failure is the move's own, the lane goes on; a closed lane's is one."""
        with self._order:
            if not self._closing:
                if move.source.staged:
                    self._moves.put(move)
                else:  # there is nothing to load
                    self._parts.put(move)
                return
        self._gives_up(move)
        move.finish(None, time.perf_counter())

    def close(self) -> None:
        """Give up what has not begun, wait for what has, end the threads. May be called again."""
        with self._order:
            self._closing = True
            self._moves.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def _load_moves(self) -> None:
        while (move := self._moves.get()) is not None:
            self._load_parts(move)
            self._parts.put(_Part(move))
        self._parts.put(None)

    def _load_parts(self, move: Transfer) -> None:
        for number in range(move.source.num_parts):
            if self._gives_up(move):
                return
            staging: StagingSlot | None = None
            loading: Sequence[Future[None]] = ()
            begun_at_s = time.perf_counter()
            try:
                staging = self._staging.take()
                begun_at_s = time.perf_counter()
                loading = move.source.load(number, staging.memory)
            except BaseException as failure:  # raised where the move is waited for
                move.fail(failure)
            self._parts.put(_Part(move, number, staging, loading, begun_at_s))

    def _send_parts(self) -> None:
        last_loaded_s = 0.0
        while (part := self._parts.get()) is not None:
            if isinstance(part, Transfer):
                self._send_unstaged(part)
                continue
            if part.number is None:
                self._finish(part.move)
                continue
            # Every read must be over, whatever the others came to: the staging slot is reused.
            for failure in [read.exception() for read in part.loading]:
                if failure is not None:
                    part.move.fail(failure)
            part.move.loaded_at_s = time.perf_counter()
            self._note_load(part, last_loaded_s)
            last_loaded_s = part.move.loaded_at_s
            self._send(part)

    def _send_unstaged(self, move: Transfer) -> None:
        for number in range(move.source.num_parts):
            if not self._gives_up(move):
                self._send(_Part(move, number))
        self._finish(move)

    def _gives_up(self, move: Transfer) -> bool:
        """Whether no more of the move need be carried."""
        if self._closing:
            move.fail(LaneClosed(f"the {self._name} lane was closed while {move.name} was on its way"))
        return move.has_failed

    def _note_load(self, part: _Part, last_loaded_s: float) -> None:
        """Put a load into the trace, from where the one before it ended: a lane's reads overlap."""
        try:
            if self._trace is not None and part.staging is not None:
                self._trace.add(self._name, part.move.name, max(part.begun_at_s, last_loaded_s), part.move.loaded_at_s)
        except BaseException as failure:  # as above
            part.move.fail(failure)

    def _send(self, part: _Part) -> None:
        move, stream, number = part.move, part.move.target.stream, part.number
        assert number is not None
        sent: Event | None = None
        try:
            if not move.has_failed:
                if number == 0 and move.target.reusable_after is not None:
                    stream.after(move.target.reusable_after)
                begin = stream.mark() if self._trace is not None else None
                move.source.send(number, stream, move.target.memory, part.staging.memory if part.staging else None)
                if begin is not None and self._trace is not None:
                    lane = "host to device" if stream is self.stream else "host"  # a home in host memory is filled
                    self._trace.add_between(lane, move.name, begin, stream.mark())
        except BaseException as failure:  # as above
            move.fail(failure)
        try:
            if part.staging is not None:  # also after a send that failed half way: it has copies under way
                sent = stream.mark()
        except BaseException as failure:  # as above; a device that cannot record an event copies no more either
            move.fail(failure)
        if part.staging is not None:
            self._staging.put(part.staging, sent)

    def _finish(self, move: Transfer) -> None:
        sent: Event | None = None
        try:
            sent = move.target.stream.mark()  # after a failure too: parts that came before it may be under way
        except BaseException as failure:  # as above
            move.fail(failure)
        move.finish(sent, time.perf_counter())
