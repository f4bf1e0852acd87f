"""Serves the other ranks while this one computes nothing: they cannot gather a slab without its ranges."""

import threading
from contextlib import AbstractContextManager
from typing import Final

import torch

from zinfer.offload.streamer import Streamer
from zinfer.ranks.model_ranks import ModelRanks

_POLL_S: Final = 0.25  # how soon the end of all ranks is noticed; blocks are served at once


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
        self._ranks, self._streamer, self._lock, self._device = ranks, streamer, lock, device
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="zinfer-rank-service", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Serve until no rank asks for another block, or one has failed; may be called again. Takes the lock."""
        if not self._closing and self._ranks.failure is None:
            self._ranks.say_done()
        self._closing = True
        self._thread.join()

    def _run(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        try:
            while self._ranks.failure is None:
                are_done = self._closing and self._ranks.all_are_done()  # before the wait: the last turn is served too
                turn = self._ranks.wait_for_turn(_POLL_S)
                if turn is not None:
                    self._serve(*turn)
                elif are_done:
                    return
        except BaseException as failure:  # raised on all ranks where they wait for blocks
            self._ranks.fail(failure)

    def _serve(self, turn: int, index: int) -> None:
        with self._lock, torch.no_grad():
            if self._ranks.turn != turn:  # taken by this rank's own pass, or in one
                return
            taken = self._ranks.take_turn(index, expected=True)
            assert taken == index, f"turn {turn} was block {index} and is now {taken}"
            self._streamer.serve(index)
