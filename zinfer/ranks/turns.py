"""The turns of ranks that share or divide the same layers: one sequence of uses of blocks, kept in rank 0's store.

See the notes of `zinfer.offload.ranks`.
"""

from collections.abc import Callable
from typing import Final

from zinfer.errors import RankError
from zinfer.offload.ranks import Turn
from zinfer.ranks.mesh import DIVIDING, Mesh
from zinfer.ranks.rank_store import RankStore

_PATIENCE_S: Final = 1.0  # for a rank in the middle of a pass to ask for its next block
_KEPT_TURNS: Final = 1000  # more than any rank is behind another


class Turns:
    """One rank's side.

    Args:
        mesh: how the ranks are arranged.
        rank: this one's number.
        store: a connection of the thread that runs the model.
        coming: one of the thread that serves the others.
        check: raises the error of a rank that has failed.

    Attributes:
        number: of turns that have been taken.
    """

    def __init__(self, mesh: Mesh, rank: int, store: RankStore, coming: RankStore, check: Callable[[], None]) -> None:
        self._rank, self._store, self._coming, self._check = rank, store, coming, check
        self._members = mesh.ranks_in(("zero", *DIVIDING), rank)
        self._user = mesh.ranks_in(DIVIDING, rank)[0]  # stands for the ranks that divide layers together
        self._is_divided = mesh.num_dividing > 1
        self.number = 0

    def take(self, index: int, *, expected: bool) -> Turn:
        """As `zinfer.offload.ranks.Ranks.take_turn`.

        Raises:
            RankError: another rank failed, or one that divides layers with this one uses another block.
        """
        key = self._key(self.number)
        if not expected:
            self._store.arrives(key, _PATIENCE_S)
        taken, user = map(int, self._store.set_once(key, f"{index} {self._user}").split())
        is_own = user == self._user or self._joins(key, taken == index)
        if is_own and taken != index:
            raise RankError(
                f"rank {self._rank} uses block {index} where one that divides layers with it uses block {taken}; such "
                "ranks must make the same calls in the same order"
            )
        self._end()
        return Turn(taken, is_own)

    def serve(self) -> int | None:
        """Take part in the turn that another rank has asked for; returns its block.

        None if no rank has asked, or if the turn is of this rank's own pass, which is still to come to it.

        Raises:
            RankError: another rank failed.
        """
        key = self._key(self.number)
        if not self._store.has(key):
            return None
        taken, user = map(int, self._store.get(key).split())
        if user == self._user or self._joins(key, False):
            return None
        self._end()
        return taken

    def wait_for_next(self, timeout_s: float) -> int | None:
        """Wait until a rank asks for the next block; returns the turn's number, None after the timeout.

        Called by another thread than `take`.
        """
        number = self.number
        return number if self._coming.arrives(self._key(number), timeout_s) else None

    def say_done(self) -> None:
        """Tell the other ranks that this one asks for no more blocks."""
        self._store.set(f"done/{self._rank}", "1")

    def all_are_done(self) -> bool:
        """Whether no rank asks for another block; called by the thread of `wait_for_next`."""
        return self._coming.has(*(f"done/{rank}" for rank in self._members))

    def _joins(self, key: str, wants: bool) -> bool:
        """Whether this rank, and those that divide layers with it, use others' turn: as the first of them wants."""
        if not self._is_divided:
            return wants
        return self._store.set_once(f"{key}/{self._user}", str(int(wants))) == "1"

    def _end(self) -> None:
        if self.number >= _KEPT_TURNS:
            old = self._key(self.number - _KEPT_TURNS)
            if self._rank == self._members[0]:
                self._store.delete(old)
            if self._is_divided and self._rank == self._user:
                self._store.delete(f"{old}/{self._user}")
        self._check()
        self.number += 1

    def _key(self, number: int) -> str:
        return f"turn/{self._members[0]}/{number}"
