"""Serves the other ranks while this one computes nothing: they cannot gather a slab without its ranges.

[Note: in step]
A rank that served the others while it samples tokens, between two of its own passes, would miss the pass that it is
about to make with them: it would then wait for the end of theirs, they for the end of its, and every slab would be
gathered twice. So for a moment after a pass the next turn is left to this rank's own next pass.

Likewise a rank that served another's first pass, because its own rows reach it a little later, would stay a pass behind
it: where passes of many prompts follow passes of few, each rank would wait for the other's long ones. So the first turn
of all is left to this rank's own first pass, too.
"""

import time
from contextlib import AbstractContextManager
from typing import Final

import torch

from zinfer.errors import RankError
from zinfer.nvme.pool import start_thread
from zinfer.offload.stream import Event
from zinfer.offload.streamer import Streamer
from zinfer.ranks.model_ranks import ModelRanks

_POLL_S: Final = 0.25  # how soon the end of all ranks is noticed; blocks are served at once
_GAP_S: Final = 0.1
"""Most seconds that a rank needs from the end of a pass on the device to the beginning of the next."""
_START_S: Final = 1.0
"""Most seconds that a rank's first pass comes after another's, if both have rows; one without rows makes it wait."""
_GAP_POLL_S: Final = 1e-3


class RankService:
    """A thread that gathers and releases the blocks that other ranks ask for while the model's lock is free.

    Args:
        ranks: the other ranks.
        streamer: of this rank.
        lock: held by whoever runs the model.
        device: where the model computes.
    """

    def __init__(
        self, ranks: ModelRanks, streamer: Streamer, lock: AbstractContextManager[bool], device: torch.device
    ) -> None:
        self._ranks, self._turns = ranks, ranks.turns
        self._streamer, self._lock, self._device = streamer, lock, device
        self._closing = False
        self._last_call: Event | None = None
        self._asked_since_s: float | None = None
        # Its failure is raised on all ranks where they wait for blocks.
        self._thread = start_thread("zinfer-rank-service", self._run, ranks.fail)

    def note_call(self, end: Event) -> None:
        """Note that a call of this rank is over on the device after an event; called with the lock."""
        self._last_call = end

    def serve_next(self) -> bool:
        """Serve the next turn if another rank has asked for it; called with the lock, while no block is in use."""
        index = self._turns.serve()
        if index is not None:
            with self._ranks.progress.taking_part():
                self._streamer.serve(index)
        return index is not None

    def close(self) -> None:
        """Serve until no rank asks for another block, or one has failed; may be called again. Takes the lock."""
        if not self._closing and self._ranks.failure is None:
            self._turns.say_done()
        self._closing = True
        self._thread.join()

    def _run(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        while self._ranks.failure is None:
            are_done = self._closing and self._turns.all_are_done()  # before the wait: the last turn is served too
            turn = self._turns.wait_for_next(_POLL_S)
            if turn is not None:
                self._serve(turn)
            elif are_done:
                return

    def _serve(self, turn: int) -> None:
        while self._ranks.failure is None and not self._try_serve(turn):
            time.sleep(_GAP_POLL_S)

    def _try_serve(self, turn: int) -> bool:
        """Serve a turn unless this rank's own pass may begin with it; returns whether it is taken."""
        with self._lock, torch.no_grad():
            if self._turns.number != turn:  # taken by this rank's own pass, or in one
                return True
            if self._pass_may_follow():
                return False
            if self.serve_next():
                return True
            if self._closing:
                raise RankError(
                    f"{self._ranks.name_of(self._ranks.group.rank)} makes no more calls, and one that divides layers "
                    "with it does; such ranks must make the same calls"
                )
            return False

    def _pass_may_follow(self) -> bool:
        if self._closing or self._ranks.failure is not None:
            return False
        last = self._last_call
        if last is None:
            self._asked_since_s = self._asked_since_s or time.perf_counter()
            return time.perf_counter() - self._asked_since_s < _START_S
        return not last.is_reached() or time.perf_counter() - last.time_s() < _GAP_S
