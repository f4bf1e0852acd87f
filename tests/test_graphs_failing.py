"""Forwards that cannot be recorded: the same results, launched by Python, and torch as it was before."""

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from graph_support import StandIn, assert_in_order, stand_in

from zinfer.graphs.forward_graphs import FIRST, ForwardGraphs
from zinfer.graphs.recorder import CudaRecorder

__all__ = ["stand_in"]  # a fixture

ASKED = "cannot be recorded: aten::_local_scalar_dense waits for the device"
BEHIND_TORCH: dict[str, Callable[[torch.Tensor], object]] = {
    "synchronize": lambda x: torch.cuda.current_stream().synchronize(),
    "a tensor of numbers": lambda x: torch.tensor([1.0, 2.0], device=x.device),
}
"""Waits that a mode for dispatching does not see: CUDA breaks the capture off."""
Wait = Callable[[torch.Tensor], object]


def forward(x: torch.Tensor, wait: Wait | None) -> torch.Tensor:
    y = x * 2
    if wait is not None:
        wait(y)
    return y.sin() + x


def numbers(rows: int, device: str) -> torch.Tensor:
    return torch.randn(rows, 5, generator=torch.Generator().manual_seed(rows)).to(device)


def assert_replayed(graphs: ForwardGraphs, device: str, rows: int) -> None:
    """Others of the same form are, of which the first are recorded."""
    before = graphs.counts.replayed
    for seed in range(3):
        x = numbers(rows, device) + seed
        assert torch.equal(graphs.call(lambda x: forward(x, None), x), forward(x, None))
    assert graphs.counts.replayed >= before + 2


def assert_launched_by_python(graphs: ForwardGraphs, device: str, wait: Wait) -> str:
    """What waits gives what it gives, and says why; the reason."""
    before = graphs.counts.recorded
    already = graphs.counts.eager.copy()
    for seed in range(4):
        x = numbers(1, device) + seed
        assert torch.equal(graphs.call(lambda x: forward(x, wait), x), forward(x, None))
    assert graphs.counts.recorded == before
    seen = graphs.counts.eager - already
    assert seen.pop(FIRST) == 1
    ((reason, count),) = seen.items()
    assert count == 3
    return reason


def test_a_forward_that_asks_the_device(device: str, stand_in: StandIn) -> None:
    graphs = ForwardGraphs(CudaRecorder() if device == "cuda" else stand_in, torch.device(device))
    assert_replayed(graphs, device, 2)
    assert assert_launched_by_python(graphs, device, lambda x: x.sum().item()) == ASKED
    if device == "cuda":
        assert_in_order()
    assert_replayed(graphs, device, 2)
    assert_replayed(graphs, device, 3)
    assert graphs.counts.recorded == 2
    graphs.close()


def test_a_forward_that_goes_on_without_what_it_asked_for(device: str, stand_in: StandIn) -> None:
    graphs = ForwardGraphs(CudaRecorder() if device == "cuda" else stand_in, torch.device(device))

    def wait(x: torch.Tensor) -> None:
        try:
            x.sum().item()
        except Exception:
            x.zero_()

    assert assert_launched_by_python(graphs, device, wait) == ASKED
    assert_replayed(graphs, device, 2)
    graphs.close()


def test_nothing_is_kept_of_a_forward_that_failed(stand_in: StandIn) -> None:
    graphs = ForwardGraphs(stand_in, torch.device("cpu"))
    seen: list[weakref.ref[torch.Tensor]] = []

    def wait(x: torch.Tensor) -> None:
        seen.append(weakref.ref(x))
        x.sum().item()

    gc.disable()
    try:
        assert assert_launched_by_python(graphs, "cpu", wait) == ASKED
        assert [ref() for ref in seen] == [None] * 5
    finally:
        gc.enable()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", BEHIND_TORCH)
def test_a_capture_that_breaks_off(kind: str) -> None:
    graphs = ForwardGraphs(CudaRecorder(), torch.device("cuda"))
    assert_replayed(graphs, "cuda", 2)
    reason = assert_launched_by_python(graphs, "cuda", BEHIND_TORCH[kind])
    assert reason.startswith("cannot be recorded: CUDA error"), reason
    assert_in_order()
    assert_replayed(graphs, "cuda", 2)  # what was recorded before still holds
    assert_replayed(graphs, "cuda", 3)
    assert graphs.counts.recorded == 2
    graphs.close()
    assert_replayed(graphs, "cuda", 4)
    assert_in_order()


@pytest.mark.gpu
def test_a_capture_that_code_breaks_off_and_says_nothing_of() -> None:
    graphs = ForwardGraphs(CudaRecorder(), torch.device("cuda"))

    def wait(x: torch.Tensor) -> None:
        with suppress(RuntimeError):
            torch.cuda.current_stream().synchronize()

    reason = assert_launched_by_python(graphs, "cuda", wait)
    assert reason.startswith("cannot be recorded: CUDA error"), reason
    assert_in_order()
    assert_replayed(graphs, "cuda", 2)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["asks the device", *BEHIND_TORCH])
def test_memory_of_what_failed_is_given_back(kind: str) -> None:
    if kind in BEHIND_TORCH and torch.__version__ >= "2.12":
        pytest.skip("torch ends a broken capture itself, and not each version gives the pool's memory back")
    wait = BEHIND_TORCH.get(kind, lambda x: x.sum().item())
    x = torch.ones(1 << 20, device="cuda")

    def fail() -> None:
        graphs = ForwardGraphs(CudaRecorder(), torch.device("cuda"))
        for _ in range(3):
            graphs.call(lambda x: forward(x, wait), x)
        assert graphs.counts.eager.total() == 3
        assert graphs.counts.eager[FIRST] == 1
        graphs.close()

    def reserved_bytes() -> int:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    fail()  # what torch keeps for good, such as the stream's own, is there from now on
    before = reserved_bytes()
    for _ in range(3):
        fail()
    assert reserved_bytes() == before
    assert_in_order()


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
    """torch.cuda.CUDAGraph"""

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
    """torch.cuda.graph"""

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


def record(recorder: CudaRecorder, compute: Callable[[], object]) -> Callable[[], None]:
    with recorder.session():
        recorder.begin()
        compute()
        return recorder.end()


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
def test_torch_is_put_right_after_a_capture_that_broke_off(
    captures: Captures, error: type[BaseException] | None
) -> None:
    recorder = CudaRecorder()
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
    recorder = CudaRecorder()

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
    recorder = CudaRecorder()
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
