"""Movers run every move once, in order of submission, and whoever waits for a move gets what it ended with."""

import threading
import time
from collections.abc import Callable

import pytest
import torch

from zinfer.offload.block import Block, SlabLayout
from zinfer.offload.movers import Move, Movers
from zinfer.offload.slots import Slot
from zinfer.offload.stream import Event, HostStream

ARRIVED = HostStream().mark()


def move(index: int = 0) -> Move:
    return Move(Block(index, f"block {index}", SlabLayout.pack([]), ()), Slot(index, torch.empty(0)))


class Recorder:
    """Runs moves as told and keeps which."""

    def __init__(self, work: Callable[[Move], None] = lambda move: None) -> None:
        self.ran: list[Move] = []
        self._work = work

    def __call__(self, move: Move) -> Event:
        self.ran.append(move)
        self._work(move)
        return ARRIVED


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_move_that_is_submitted_twice_runs_once(num_threads: int) -> None:
    run = Recorder(lambda move: time.sleep(0.002))
    movers = Movers(num_threads, run)
    moves = [move(index) for index in range(20)]
    for each in moves:
        movers.submit(each)
        movers.submit(each)
    movers.close()
    assert sorted(each.block.index for each in run.ran) == list(range(20))
    assert all(each.failure() is None and each.sent() is ARRIVED for each in moves)


def test_one_mover_keeps_the_order() -> None:
    run = Recorder()
    movers = Movers(1, run)
    moves = [move(index) for index in range(50)]
    for each in moves:
        movers.submit(each)
    movers.close()
    assert run.ran == moves


def test_close_waits_for_every_move_and_ends_the_threads() -> None:
    before = set(threading.enumerate())
    movers = Movers(2, Recorder(lambda move: time.sleep(0.02)))
    moves = [move(index) for index in range(9)]
    for each in moves:
        movers.submit(each)
    assert not moves[-1].is_over
    movers.close()
    assert all(each.is_over for each in moves)
    assert set(threading.enumerate()) <= before
    movers.close()


@pytest.mark.parametrize("error", [OSError("disk"), KeyboardInterrupt(), SystemExit(3)], ids=repr)
def test_a_failure_reaches_whoever_waits_and_the_mover_goes_on(error: BaseException) -> None:
    def fail_first(each: Move) -> None:
        if each.block.index == 0:
            raise error

    movers = Movers(1, Recorder(fail_first))
    failing, following = move(0), move(1)
    movers.submit(failing)
    movers.submit(following)
    assert failing.failure() is error
    assert failing.failure() is error, "asked for twice"
    assert following.failure() is None
    assert following.sent() is ARRIVED
    movers.close()


def test_wait_is_over_when_the_move_is() -> None:
    go_on = threading.Event()
    movers = Movers(1, Recorder(lambda move: go_on.wait(20) and None))
    slow = move()
    movers.submit(slow)
    assert not slow.is_over
    threading.Timer(0.05, go_on.set).start()
    slow.wait()
    assert slow.is_over
    movers.close()
