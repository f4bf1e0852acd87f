"""Moves of blocks into slots, and the threads that run them.

[Note: Ctrl-C] The thread that drives a streamer may be interrupted between any two of its lines, also inside the Python
code of `threading.Condition`, on which `concurrent.futures` rests: a lock left taken there hangs whoever comes next. So
that thread touches only single C calls here: a plain lock, and `queue.SimpleQueue`.
"""

import queue
import threading
import time
from collections.abc import Callable, Mapping

from zinfer.offload.block import Block
from zinfer.offload.slots import Slot, StagingRing
from zinfer.offload.source import Source
from zinfer.offload.stream import CopyStream, Event


class Move:
    """A block on its way into a slot. One mover runs it, one thread waits for it."""

    def __init__(self, block: Block, slot: Slot) -> None:
        self.block = block
        self.slot = slot
        self.loaded_at_s = 0.0
        self.is_over = False
        self._sent: Event | None = None
        self._failure: BaseException | None = None
        self._claimed = threading.Lock()
        self._over = threading.Lock()
        self._over.acquire()

    def claim(self) -> bool:
        """Whether the caller is the one who runs it: a move may be submitted twice and runs once."""
        return self._claimed.acquire(blocking=False)

    def finish(self, sent: Event | None, failure: BaseException | None) -> None:
        """Say how it ended: ``sent`` is the event after which the slot is ready."""
        self._sent, self._failure = sent, failure
        self.is_over = True
        self._over.release()

    def wait(self) -> None:
        """Block until it is over."""
        if not self.is_over:
            self._over.acquire()

    def failure(self) -> BaseException | None:
        """Wait until it is over; what it failed with, or None."""
        self.wait()
        return self._failure

    def sent(self) -> Event:
        """The event of a move that did not fail."""
        assert self._sent is not None
        return self._sent


class Transfer:
    """What a mover does: brings a block's bytes within the device's reach, then enqueues their copies into the slot.

    ``bytes_moved`` counts what was copied into slots. With ``synchronous`` the copies are over when it returns.
    """

    def __init__(
        self, sources: Mapping[int, Source], stream: CopyStream, staging: StagingRing, *, synchronous: bool
    ) -> None:
        self._sources = sources
        self._stream = stream
        self._staging = staging
        self._synchronous = synchronous
        self._lock = threading.Lock()
        self.bytes_moved = 0

    def __call__(self, move: Move) -> Event:
        """Returns the event after which the slot is ready."""
        source = self._sources[move.block.index]
        staging = self._staging.take() if source.staging_bytes else None
        sent: Event | None = None
        try:
            if staging is not None:
                source.load(staging.memory)
            move.loaded_at_s = time.perf_counter()
            if move.slot.vacant is not None:
                self._stream.after(move.slot.vacant)
            source.send(self._stream, move.slot.buffer, staging.memory if staging else None)
            sent = self._stream.mark()
        finally:
            if staging is not None:  # a send that failed half way has copies under way too
                self._staging.put(staging, sent or self._stream.mark())
        with self._lock:
            self.bytes_moved += source.wire_bytes
        if self._synchronous:
            sent.synchronize()
        return sent


class Movers:
    """Threads that run moves in the order of submission.

    Args:
        num_threads: moves under way at once.
        run: does the work of a move and returns the event after which its slot is ready.
    """

    def __init__(self, num_threads: int, run: Callable[[Move], Event]) -> None:
        self._run = run
        self._queue: queue.SimpleQueue[Move | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"zinfer-move-{number}", daemon=True)
            for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, move: Move) -> None:
        """Have the move run; returns at once."""
        self._queue.put(move)

    def close(self) -> None:
        """Wait for the moves submitted so far and end the threads. May be called again."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def _work(self) -> None:
        while (move := self._queue.get()) is not None:
            if move.claim():
                try:
                    move.finish(self._run(move), None)
                except BaseException as failure:  # whoever waits for the block gets it
                    move.finish(None, failure)
