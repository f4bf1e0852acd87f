"""One sequence of turns for ranks that divide and share layers, in any order in which they come by."""

import random
from typing import Any, cast

import pytest

from zinfer.errors import RankError
from zinfer.ranks.mesh import Mesh
from zinfer.ranks.rank_store import RankStore
from zinfer.ranks.turns import Turns

NUM_BLOCKS = 4


class Store:
    """The store of all ranks in one process."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def set_once(self, key: str, value: str) -> str:
        return self.values.setdefault(key, value)

    def get(self, key: str) -> bytes:
        return self.values[key].encode()

    def has(self, *keys: str) -> bool:
        return all(key in self.values for key in keys)

    def arrives(self, key: str, timeout_s: float) -> bool:
        return key in self.values

    def delete(self, key: str) -> None:
        self.values.pop(key, None)

    def set(self, key: str, value: str) -> None:
        self.values[key] = value


def turns_of(mesh: Mesh, rank: int, store: Store) -> Turns:
    held: Any = store
    return Turns(mesh, rank, cast(RankStore, held), cast(RankStore, held), lambda: None)


class Rank:
    """Makes passes over all blocks, and takes part in those of others meanwhile."""

    def __init__(self, mesh: Mesh, rank: int, store: Store, num_passes: int) -> None:
        self.turns = turns_of(mesh, rank, store)
        self.left = [*range(NUM_BLOCKS)] * num_passes
        self.seen: list[int] = []
        self.own: list[int] = []  # turns of its own uses

    def step(self, draw: random.Random) -> None:
        """Take a turn, or serve one while no pass is under way."""
        in_pass = len(self.left) % NUM_BLOCKS > 0
        if self.left and (in_pass or draw.random() < 0.4):
            number, turn = self.turns.number, self.turns.take(self.left[0], expected=True)
            self.seen.append(turn.block)
            if turn.is_own:
                self.own.append(number)
                del self.left[0]
        elif not in_pass and (block := self.turns.serve()) is not None:
            self.seen.append(block)


@pytest.mark.parametrize("seed", range(100))
def test_a_group_uses_the_same_turns(seed: int) -> None:
    draw = random.Random(seed)
    sizes: dict[Any, int] = {"zero": draw.randint(1, 3), draw.choice(["tensor", "expert"]): draw.randint(1, 3)}
    mesh, store = Mesh(**sizes, replicas=draw.randint(1, 2)), Store()
    num_passes = [draw.randint(0, 4) for _ in range(mesh.num_shares)]
    ranks = [Rank(mesh, rank, store, num_passes[mesh.share_of(rank)]) for rank in range(mesh.size)]
    weights = [draw.random() + 0.05 for _ in ranks]  # some are slow
    for _ in range(20_000):
        if not any(rank.left for rank in ranks) and len({rank.turns.number for rank in ranks}) == mesh.replicas:
            break
        draw.choices(ranks, weights)[0].step(draw)
    assert not any(rank.left for rank in ranks), "nobody waits for ever"
    for number, rank in enumerate(ranks):
        first = ranks[mesh.ranks_in_step(number)[0]]
        assert rank.own == first.own
        together = ranks[mesh.ranks_in(("zero", "expert", "tensor"), number)[0]]
        shortest = min(len(rank.seen), len(together.seen))
        assert rank.seen[:shortest] == together.seen[:shortest], "one order for all"
        assert [rank.seen[turn] for turn in rank.own] == [*range(NUM_BLOCKS)] * num_passes[mesh.share_of(number)]


def test_groups_that_want_the_same_block_use_it_together() -> None:
    """The second group's first rank decides; its other one, that has not begun, leaves the turn to its pass."""
    store, mesh = Store(), Mesh(zero=2, tensor=2)
    first, second, third, fourth = (turns_of(mesh, rank, store) for rank in range(4))
    assert first.take(0, expected=True) == (0, True)
    assert third.take(0, expected=True) == (0, True)
    assert fourth.serve() is None
    assert second.serve() is None
    assert fourth.take(0, expected=True) == (0, True)
    assert second.take(0, expected=True) == (0, True)
    assert first.take(1, expected=True) == (1, True)
    assert fourth.take(2, expected=True) == (1, False), "it wants another block, so its group only takes part"
    assert third.take(1, expected=True) == (1, False)


def test_ranks_that_part_are_told() -> None:
    store, mesh = Store(), Mesh(zero=2, tensor=2)
    first, second = turns_of(mesh, 0, store), turns_of(mesh, 1, store)
    first.take(3, expected=True)
    with pytest.raises(RankError, match="rank 1 uses block 0 where one that divides layers with it uses block 3; such"):
        second.take(0, expected=True)


def test_old_turns_are_forgotten() -> None:
    store, mesh = Store(), Mesh(zero=2, tensor=2)
    several = [turns_of(mesh, rank, store) for rank in range(4)]
    for number in range(1100):
        for turns in several:
            turns.take(number % 3, expected=True)
    assert len(store.values) < 3 * 1010
