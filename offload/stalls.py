"""What a streamer's waiting is put down to: compute that waits for weights, and lanes that wait for compute."""

import time
from collections.abc import Collection, Iterable

from zinfer.offload.block import Tier
from zinfer.offload.transfer import Transfer
from zinfer.offload.transfer_lane import TransferLane


class Stalls:
    """Seconds waited, by cause.

    Args:
        lanes: whose copy streams tell what was waited for on the device.
    """

    def __init__(self, lanes: Collection[TransferLane]) -> None:
        self._lanes = lanes
        self._seconds = {"disk": 0.0, "host": 0.0, "link": 0.0, "compute": 0.0}
        self._full_since_s: float | None = None
        self._is_paused = False
        # Beside a CUDA device the copy streams' own waits tell, and a move that is over may still be copying.
        self._counts_idleness = not any(lane.stream.needs_pinned for lane in lanes)

    def seconds(self) -> dict[str, float]:
        """So far: compute for disk, host and link, copies for compute."""
        seconds = dict(self._seconds)
        for lane in self._lanes:
            seconds["link"] += lane.stream.compute_waited_s()
            seconds["compute"] += lane.stream.copies_waited_s()
        return seconds

    def note_wait(self, move: Transfer, begin_s: float) -> None:
        """Account for the time since ``begin_s`` in which a block was waited for that has come by the move."""
        waited_s = time.perf_counter() - begin_s
        loading_s = min(max(move.loaded_at_s - begin_s, 0.0), waited_s) if move.source.staged else 0.0
        self._seconds["disk" if move.source.tier is Tier.DISK else "host"] += loading_s
        self._seconds["link"] += waited_s - loading_s

    def note_full(self) -> None:
        """Compute holds the slots: from now on the lanes may have nothing to move."""
        if self._full_since_s is None:
            self._full_since_s = time.perf_counter()

    def pause(self, moves: Iterable[Transfer]) -> None:
        """Stop the clock of `note_full` between two calls, where the lanes wait for nothing that a call does."""
        self._is_paused = self._full_since_s is not None
        self.note_room(moves)

    def resume(self) -> None:
        """Let the clock that `pause` stopped go on."""
        if self._is_paused:
            self._is_paused = False
            self.note_full()

    def note_ahead(self) -> None:
        """All that is expected is there or on its way: the lanes wait for nobody."""
        self._full_since_s = None

    def note_room(self, moves: Iterable[Transfer]) -> None:
        """Account for the time in which the lanes, with these moves behind them, had no slot to move anything into."""
        full_since_s, self._full_since_s = self._full_since_s, None
        if full_since_s is None or not self._counts_idleness:
            return
        several = list(moves)
        if all(move.is_over for move in several):
            last_s = max((move.finished_at_s for move in several), default=0.0)
            self._seconds["compute"] += time.perf_counter() - max(full_since_s, last_s)
