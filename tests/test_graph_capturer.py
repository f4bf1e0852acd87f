"""What a recorder leaves of captures that fail, by the state that torch then has: before 2.12, and later."""

from collections import Counter
from collections.abc import Callable

import pytest
import torch

from zinfer.graphs.capturer import CudaCapturer


class Captures:
    """What torch knows of captures, without a GPU.

    Args:
        ends_all: later than 2.12, when a capture whose end fails is ended, and gives up its pool as others do.

    Attributes:
        is_open, is_broken: of CUDA's own capture.
        under_way: pools that the allocator captures into.
        pinned: likewise the allocator of pinned memory.
        users: of the pools.
        draws_are_captured: what the generator of random numbers believes.
        num_graphs: made.
    """

    def __init__(self, ends_all: bool) -> None:
        self.ends_all = ends_all
        self.is_open = self.is_broken = False
        self.under_way: list[int] = []
        self.pinned: list[int] = []
        self.users: Counter[int] = Counter()
        self.draws_are_captured = False
        self.num_pools = self.num_graphs = 0

    def new_pool(self) -> int:
        self.num_pools += 1
        return self.num_pools

    def end_allocation(self, device: int, pool: int) -> None:
        if pool not in self.under_way:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.under_way.remove(pool)

    def release(self, device: int, pool: int) -> None:
        assert self.users[pool] > 0
        self.users[pool] -= 1

    def assert_in_order(self) -> None:
        assert not self.is_open
        assert not self.under_way
        assert not self.draws_are_captured


class Graph:
    """torch.cuda.CUDAGraph."""

    def __init__(self, captures: Captures) -> None:
        self._captures = captures
        self._pool: int | None = None
        self._has_ended = False
        captures.num_graphs += 1

    def __del__(self) -> None:
        if self._pool is not None and (self._has_ended or self._captures.ends_all):
            self._captures.release(0, self._pool)

    def capture_begin(self, pool: int) -> None:
        captures = self._captures
        assert not captures.under_way, "captures_underway.empty()"
        assert pool not in captures.pinned, "already recording to mempool_id"
        self._pool = pool
        captures.users[pool] += 1
        captures.under_way.append(pool)
        captures.pinned.append(pool)
        captures.draws_are_captured = captures.is_open = True

    def capture_end(self) -> None:
        captures = self._captures
        if self._pool is None:
            raise RuntimeError("Capture must end on the same stream it began on.")
        fails = captures.is_broken or not captures.is_open
        captures.is_broken = captures.is_open = False
        if fails and not captures.ends_all:
            raise RuntimeError("operation failed due to a previous error during capture")
        captures.end_allocation(0, self._pool)
        captures.pinned.remove(self._pool)
        if fails:
            raise RuntimeError("operation failed due to a previous error during capture")
        captures.draws_are_captured = False
        self._has_ended = True

    def pool(self) -> int | None:
        assert self._has_ended
        return self._pool

    def replay(self) -> None:
        """Nothing is computed."""


class Capture:
    """torch.cuda.graph."""

    def __init__(self, graph: Graph, pool: int, capture_error_mode: str) -> None:
        self.capture_stream = None
        self._graph, self._pool = graph, pool

    def __enter__(self) -> None:
        self._graph.capture_begin(self._pool)

    def __exit__(self, *args: object) -> None:
        self._graph.capture_end()


@pytest.fixture(params=[False, True], ids=["before 2.12", "later"])
def captures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Captures:
    found = Captures(request.param)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: Graph(found))
    monkeypatch.setattr(torch.cuda, "graph", Capture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", found.new_pool)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", found.end_allocation, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", found.release, raising=False)
    return found


def record(recorder: CudaCapturer, compute: Callable[[], object]) -> Callable[[], None]:
    with recorder.session():
        recorder.begin()
        compute()
        return recorder.end()


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
def test_torch_is_put_right_after_a_capture_that_broke_off(
    captures: Captures, error: type[BaseException] | None
) -> None:
    recorder = CudaCapturer()
    kept = [record(recorder, lambda: None)]

    def break_off() -> None:
        captures.is_broken = True
        if error is not None:
            raise error("the first")

    for _ in range(2):
        with pytest.raises(error or RuntimeError, match="the first" if error else "previous error"):
            record(recorder, break_off)
        captures.assert_in_order()
        kept.append(record(recorder, lambda: None))
    assert captures.users[1] > 0, "what was recorded before it"
    recorder.close()
    kept.clear()
    assert not +captures.users
    captures.assert_in_order()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_capture_that_still_holds_is_ended(captures: Captures, error: type[BaseException]) -> None:
    recorder = CudaCapturer()

    def fail() -> None:
        raise error("the first")

    with pytest.raises(error, match="the first"):
        record(recorder, fail)
    captures.assert_in_order()
    assert captures.num_graphs == 2, "the one that keeps the pool, and what is given up"
    record(recorder, lambda: None)
    assert (captures.num_graphs, captures.users[1]) == (3, 1), "what is dropped is gone"


def test_a_capture_that_never_began(captures: Captures, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C strikes right before."""
    recorder = CudaCapturer()
    record(recorder, lambda: None)
    plain, strikes = Capture.__enter__, iter([True])

    def enter(self: Capture) -> None:
        if next(strikes, False):
            raise KeyboardInterrupt
        plain(self)

    monkeypatch.setattr(Capture, "__enter__", enter)
    with pytest.raises(KeyboardInterrupt):
        record(recorder, lambda: pytest.fail("it began"))
    captures.assert_in_order()
    record(recorder, lambda: None)
    assert captures.users[1] == 1
