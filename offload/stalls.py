"""Attributes stall time: compute that waits for disk, host or link, and lanes that wait for compute."""

import time
from collections.abc import Collection, Iterable

from zinfer.offload.block import Tier
from zinfer.offload.transfer import Transfer
from zinfer.offload.transfer_lane import TransferLane


class Stalls:
    """Seconds waited, by cause.

    Args:
        lanes: their copy streams time the waits on the device.
    """

    def __init__(self, lanes: Collection[TransferLane]) -> None:
        self._lanes = lanes
        self._seconds = {"disk": 0.0, "host": 0.0, "link": 0.0, "compute": 0.0}
        self._full_since_s: float | None = None
        self._is_paused = False
        # On CUDA the copy streams time their own waits, and a transfer that is over may still be copying.
        self._counts_idleness = not any(lane.stream.needs_pinned for lane in lanes)

    def seconds(self) -> dict[str, float]:
        """So far: compute waiting for disk, host and link, copies waiting for compute."""
        seconds = dict(self._seconds)
        for lane in self._lanes:
            seconds["link"] += lane.stream.compute_waited_s()
            seconds["compute"] += lane.stream.copies_waited_s()
        return seconds

    def note_wait(self, transfer: Transfer, begin_s: float) -> None:
        """Add the time since ``begin_s``, in which compute waited for the transfer."""
        waited_s = time.perf_counter() - begin_s
        loading_s = min(max(transfer.loaded_at_s - begin_s, 0.0), waited_s) if transfer.source.staged else 0.0
        self._seconds["disk" if transfer.source.tier is Tier.DISK else "host"] += loading_s
        self._seconds["link"] += waited_s - loading_s

    def note_full(self) -> None:
        """Compute holds all slots: from now on the lanes may be idle."""
        if self._full_since_s is None:
            self._full_since_s = time.perf_counter()

    def pause(self, transfers: Iterable[Transfer]) -> None:
        """Stop the clock of `note_full` between two calls, when lanes do not wait for compute."""
        self._is_paused = self._full_since_s is not None
        self.note_free_slot(transfers)

    def resume(self) -> None:
        """Start the clock again that `pause` stopped."""
        if self._is_paused:
            self._is_paused = False
            self.note_full()

    def note_ahead(self) -> None:
        """All expected blocks are in slots or on their way: the lanes wait for nothing."""
        self._full_since_s = None

    def note_free_slot(self, transfers: Iterable[Transfer]) -> None:
        """Add the time in which the lanes, done with ``transfers``, had no free slot to fill."""
        full_since_s, self._full_since_s = self._full_since_s, None
        if full_since_s is None or not self._counts_idleness:
            return
        several = list(transfers)
        if all(transfer.is_over for transfer in several):
            last_s = max((transfer.finished_at_s for transfer in several), default=0.0)
            self._seconds["compute"] += time.perf_counter() - max(full_since_s, last_s)
