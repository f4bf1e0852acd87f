"""Counters of a run: bytes moved and seconds waited."""

import threading
import time
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Final

from zinfer.offload.block import Tier
from zinfer.offload.source import Source
from zinfer.offload.stream import Event
from zinfer.offload.transfer import Transfer
from zinfer.offload.transfer_lane import TransferLane

_MOST_OPEN: Final = 4096  # arrivals whose events were not checked yet


@dataclass(frozen=True)
class RunStats:
    """Counters since the engine was made.

    A streamed block counts once compute has used it; blocks prefetched for the next pass do not count yet.

    Attributes:
        bytes_read_disk: bytes read, including alignment margins and the filling of homes.
        bytes_to_device: bytes copied into device slots and resident slabs.
        streamed_bytes_per_pass: bytes that one walk over all blocks copies to the device; a pass that skips blocks (an
            encoder's, once its output is known) copies less.
        disk_bytes_per_pass: the part of them whose home is the disk.
        gathered_bytes: bytes of streamed slabs that other ranks sent to this one.
        pinned_bytes: host memory registered with CUDA at present.
        host_bytes: host memory of slabs and staging slots, pinned or not, at present.
        device_bytes: device memory of resident slabs and slots, at present.
        blocks_by_home: number of blocks by tier: DEVICE, HOST, DISK.
        stall_s: seconds waited, by cause: compute for disk (reads), host (copies between host buffers) and link (copies
            to the device), and copies for compute.
        loaded_bytes: bytes read from disk to fill homes, before the first pass.
        load_s: seconds that filling the homes took.
        link_share: streamed bytes over ``span_s``, as a share of the link's measured rate; None if one is not known.
        disk_share: likewise for bytes read and the disk's rate.
        kv_bytes_to_device: bytes of the KV cache in host memory copied to the device.
        kv_bytes_to_host: bytes of it copied back.
        swapped_bytes_written: bytes of preempted sequences' KV cache written to the disk.
        swapped_bytes_read: bytes of it read back.
        passes: forwards of the whole model.
        passes_left_out: passes that were not computed, since all their tokens were known.
        guessed_tokens: tokens that were guessed, and verified by passes of `zinfer.LLM`.
        accepted_tokens: those of them that were right: each saved its sequence a pass.
        wall_s: seconds inside forward and generate calls; on a CUDA device a forward may return before it is computed.
        span_s: seconds from the beginning of the first call until the device was done with the last one, or until now
            if it is still under way.
    """

    bytes_read_disk: int = 0
    bytes_to_device: int = 0
    streamed_bytes_per_pass: int = 0
    disk_bytes_per_pass: int = 0
    gathered_bytes: int = 0
    pinned_bytes: int = 0
    host_bytes: int = 0
    device_bytes: int = 0
    blocks_by_home: dict[str, int] = field(default_factory=dict)
    stall_s: dict[str, float] = field(default_factory=dict)
    loaded_bytes: int = 0
    load_s: float = 0.0
    link_share: float | None = None
    disk_share: float | None = None
    kv_bytes_to_device: int = 0
    kv_bytes_to_host: int = 0
    swapped_bytes_written: int = 0
    swapped_bytes_read: int = 0
    passes: int = 0
    passes_left_out: int = 0
    guessed_tokens: int = 0
    accepted_tokens: int = 0
    wall_s: float = 0.0
    span_s: float = 0.0


class Arrivals:
    """Counts the bytes of blocks that compute has used; prefetched blocks do not count yet.

    A block counts once its event is reached: a copy that is only enqueued has not crossed the link.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # `sums` may be called from another thread
        self._open: deque[tuple[Event, int, int]] = deque()  # not the sources: they hold memory
        self._wire_bytes = 0
        self._read_bytes = 0

    def note(self, event: Event, source: Source) -> None:
        """Count the block of ``source`` once ``event`` is reached."""
        self._open.append((event, source.wire_bytes, source.read_bytes))
        if len(self._open) > _MOST_OPEN:
            self.sums()

    def sums(self) -> tuple[int, int]:
        """Return the bytes copied to the device, and the bytes read from the disk for them."""
        with self._lock:
            while self._open and self._open[0][0].is_reached():
                _, wire_bytes, read_bytes = self._open.popleft()
                self._wire_bytes += wire_bytes
                self._read_bytes += read_bytes
            return self._wire_bytes, self._read_bytes


class Stalls:
    """Seconds waited, by cause: compute for disk, host or link, and lanes for compute.

    Args:
        lanes: their copy streams time the waits on the device.
    """

    def __init__(self, lanes: Collection[TransferLane]) -> None:
        self._lanes = lanes
        self._seconds = {"disk": 0.0, "host": 0.0, "link": 0.0, "compute": 0.0}
        self._full_since_s: float | None = None
        self._is_paused = False
        # On CUDA the copy streams time their own waits, and a finished transfer may still be copying.
        self._counts_idleness = not any(lane.stream.needs_pinned for lane in lanes)

    def seconds(self) -> dict[str, float]:
        """Return the seconds so far: compute waiting for disk, host and link, copies waiting for compute."""
        seconds = dict(self._seconds)
        for lane in self._lanes:
            seconds["link"] += lane.stream.compute_waited_s()
            seconds["compute"] += lane.stream.copies_waited_s()
        return seconds

    def note_wait(self, transfer: Transfer, begin_s: float, computed: Event | None) -> None:
        """Note that the thread that launches kernels waited for the transfer from ``begin_s`` until now.

        Meanwhile no lane waited for compute. The device counts as waiting only after ``computed``, the end of the work
        that was launched before; None: the transfer was over already.
        """
        now_s = time.perf_counter()
        if self._full_since_s is not None:
            self._full_since_s += now_s - max(begin_s, self._full_since_s)
        if computed is None or not computed.is_reached():
            return
        idle_since_s = max(begin_s, computed.time_s())
        waited_s = max(now_s - idle_since_s, 0.0)
        loading_s = min(max(transfer.loaded_at_s - idle_since_s, 0.0), waited_s) if transfer.source.staged else 0.0
        self._seconds["disk" if transfer.source.tier is Tier.DISK else "host"] += loading_s
        self._seconds["link"] += waited_s - loading_s

    def note_full(self) -> None:
        """Note that compute holds all slots, so that lanes may be idle from now on."""
        if self._full_since_s is None:
            self._full_since_s = time.perf_counter()

    def pause(self, transfers: Iterable[Transfer]) -> None:
        """Stop the clock of `note_full` between two calls, while lanes wait for the caller."""
        self._is_paused = self._full_since_s is not None
        self.note_free_slot(transfers)

    def resume(self) -> None:
        """Restart the clock that `pause` stopped."""
        if self._is_paused:
            self._is_paused = False
            self.note_full()

    def note_ahead(self) -> None:
        """Note that all expected blocks are in slots or on their way: idle lanes wait for nothing."""
        self._full_since_s = None

    def note_free_slot(self, transfers: Iterable[Transfer]) -> None:
        """Add the time since ``transfers`` ended in which no slot was free."""
        full_since_s, self._full_since_s = self._full_since_s, None
        if full_since_s is None or not self._counts_idleness:
            return
        several = list(transfers)
        if all(transfer.is_over for transfer in several):
            last_s = max((transfer.finished_at_s for transfer in several), default=0.0)
            self._seconds["compute"] += time.perf_counter() - max(full_since_s, last_s)
