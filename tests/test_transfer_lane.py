"""A lane runs every move once, in order, part by part, and whoever waits for a move gets what it ended with."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from threads import within

from zinfer.offload.block import Tier
from zinfer.offload.host_memory import HostBuffer
from zinfer.offload.source import Source
from zinfer.offload.staging import StagingRing
from zinfer.offload.stream import CopyStream, HostStream
from zinfer.offload.transfer import Target, Transfer
from zinfer.offload.transfer_lane import LaneClosed, TransferLane

PART_BYTES = 4096


class Numbers(Source):
    """Parts that are filled with one number, by a thread of their own where ``delay_s`` is given."""

    tier = Tier.DISK
    staged = True

    def __init__(self, value: int, num_parts: int, delay_s: float = 0.0, fail: Callable[[int], None] | None = None):
        self.value = value
        self.num_parts = num_parts
        self.wire_bytes = num_parts * PART_BYTES
        self.delay_s = delay_s
        self.fail = fail
        self.loaded: list[int] = []

    def load(self, part: int, staging: HostBuffer) -> Sequence["Future[None]"]:
        self.loaded.append(part)
        future: Future[None] = Future()

        def fill() -> None:
            time.sleep(self.delay_s)
            try:
                if self.fail is not None:
                    self.fail(part)
                staging.tensor.fill_(self.value)
                future.set_result(None)
            except BaseException as failure:
                future.set_exception(failure)

        threading.Thread(target=fill).start()
        return [future]

    def send(self, part: int, stream: CopyStream, target: torch.Tensor, staging: HostBuffer | None) -> None:
        assert staging is not None
        stream.copy(target[part * PART_BYTES : (part + 1) * PART_BYTES], staging.tensor)


@contextmanager
def lane(num_staging: int = 2) -> Iterator[TransferLane]:
    ring = StagingRing()
    for _ in range(num_staging):
        ring.add(HostBuffer(PART_BYTES))
    opened = TransferLane("disk", HostStream(), ring)
    try:
        yield opened
    finally:
        opened.close()
        assert ring._free.qsize() == num_staging, "a staging slot was lost"
        ring.close()


def move_of(source: Source) -> Transfer:
    return Transfer("block", source, Target(torch.zeros(source.wire_bytes, dtype=torch.uint8), HostStream()))


@given(parts=st.lists(st.integers(1, 5), min_size=1, max_size=6), num_staging=st.integers(1, 4))
def test_every_part_of_every_move_lands(parts: list[int], num_staging: int) -> None:
    moves = [move_of(Numbers(value + 1, num_parts, 0.0005)) for value, num_parts in enumerate(parts)]
    with lane(num_staging) as opened:
        for move in moves:
            opened.submit(move)
        for value, move in enumerate(moves):
            assert move.failure() is None
            assert (move.target.memory == value + 1).all()
    over = [move.finished_at_s for move in moves]
    assert over == sorted(over), "in order of submission"


def test_the_next_move_is_loaded_while_the_last_parts_of_this_one_are_under_way() -> None:
    first, second = Numbers(1, 2, delay_s=0.3), Numbers(2, 2, delay_s=0.3)
    with lane(num_staging=4) as opened:
        moves = [move_of(first), move_of(second)]
        for move in moves:
            opened.submit(move)
        time.sleep(0.1)
        assert first.loaded == second.loaded == [0, 1], "all four requests are out before the first is answered"
        assert not moves[0].is_over
        moves[1].wait()


@pytest.mark.parametrize("error", [OSError("disk"), KeyboardInterrupt(), SystemExit(3)], ids=repr)
@pytest.mark.parametrize("part", [0, 1, 3])
def test_a_failure_reaches_whoever_waits_and_the_lane_goes_on(error: BaseException, part: int) -> None:
    def fail(number: int) -> None:
        if number == part:
            raise error

    with lane() as opened:
        failing, following = move_of(Numbers(1, 4, 0.001, fail)), move_of(Numbers(2, 3))
        opened.submit(failing)
        opened.submit(following)
        assert within(10, failing.failure) is error
        assert failing.failure() is error, "asked for twice"
        assert following.failure() is None
        assert (following.target.memory == 2).all()


class Refusing(Numbers):
    """Cannot even begin a load, or a copy."""

    def __init__(self, where: str) -> None:
        super().__init__(1, 2)
        self.where = where

    def load(self, part: int, staging: HostBuffer) -> Sequence["Future[None]"]:
        if self.where == "load":
            raise OSError("load")
        return super().load(part, staging)

    def send(self, part: int, stream: CopyStream, target: torch.Tensor, staging: HostBuffer | None) -> None:
        raise OSError("send")


@pytest.mark.parametrize("where", ["load", "send"])
def test_a_lane_outlives_what_its_sources_raise(where: str) -> None:
    with lane(num_staging=1) as opened:
        for _ in range(3):
            failing = move_of(Refusing(where))
            opened.submit(failing)
            failure = within(10, failing.failure)
            assert isinstance(failure, OSError)
            assert str(failure) == where
        good = move_of(Numbers(5, 3))
        opened.submit(good)
        assert good.failure() is None


def test_close_gives_up_what_has_not_begun_and_ends_the_threads() -> None:
    before = set(threading.enumerate())
    long, waiting = Numbers(1, 50, delay_s=0.05), Numbers(2, 1)
    with lane() as opened:
        moves = [move_of(long), move_of(waiting)]
        for move in moves:
            opened.submit(move)
        time.sleep(0.1)
        opened.close()
        assert all(isinstance(move.failure(), LaneClosed) for move in moves)
        assert len(long.loaded) < 50
        assert waiting.loaded == []
        opened.close()
    assert {thread for thread in threading.enumerate() if "zinfer" in thread.name} <= before


@pytest.mark.parametrize("staged", [True, False])
def test_what_a_closed_lane_is_given_fails_at_once(staged: bool) -> None:
    source = Numbers(1, 2)
    source.staged = staged
    with lane() as opened:
        opened.close()
        move = move_of(source)
        opened.submit(move)
        assert isinstance(within(10, move.failure), LaneClosed)
        assert source.loaded == []


def test_wait_is_over_when_the_move_is() -> None:
    with lane() as opened:
        slow = move_of(Numbers(1, 1, delay_s=0.1))
        opened.submit(slow)
        assert not slow.is_over
        slow.wait()
        assert slow.is_over
