"""Forwards that cannot be captured: the same results, launched by Python, and torch as it was before."""

import gc
import re
import weakref
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from graph_support import StandIn, assert_in_order, stand_in

from zinfer.graphs.capturer import CudaCapturer
from zinfer.graphs.forward_graphs import FIRST, ForwardGraphs

__all__ = ["stand_in"]  # a fixture

ASKED = "cannot be captured: aten::_local_scalar_dense waits for the device"
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
    before = graphs.counts.captured
    already = graphs.counts.eager.copy()
    for seed in range(4):
        x = numbers(1, device) + seed
        assert torch.equal(graphs.call(lambda x: forward(x, wait), x), forward(x, None))
    assert graphs.counts.captured == before
    seen = graphs.counts.eager - already
    assert seen.pop(FIRST) == 1
    ((reason, count),) = seen.items()
    assert count == 3
    return reason


def test_a_forward_that_asks_the_device(device: str, stand_in: StandIn) -> None:
    graphs = ForwardGraphs(CudaCapturer() if device == "cuda" else stand_in, torch.device(device))
    assert_replayed(graphs, device, 2)
    assert assert_launched_by_python(graphs, device, lambda x: x.sum().item()) == ASKED
    if device == "cuda":
        assert_in_order()
    assert_replayed(graphs, device, 2)
    assert_replayed(graphs, device, 3)
    assert graphs.counts.captured == 2
    graphs.close()


def test_a_forward_that_goes_on_without_what_it_asked_for(device: str, stand_in: StandIn) -> None:
    graphs = ForwardGraphs(CudaCapturer() if device == "cuda" else stand_in, torch.device(device))

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
    graphs = ForwardGraphs(CudaCapturer(), torch.device("cuda"))
    assert_replayed(graphs, "cuda", 2)
    reason = assert_launched_by_python(graphs, "cuda", BEHIND_TORCH[kind])
    # Torch looks itself at what it copies from memory that is not pinned.
    assert re.match("cannot be captured: (CUDA error|Cannot copy between CPU and CUDA)", reason), reason
    assert_in_order()
    assert_replayed(graphs, "cuda", 2)  # what was recorded before still holds
    assert_replayed(graphs, "cuda", 3)
    assert graphs.counts.captured == 2
    graphs.close()
    assert_replayed(graphs, "cuda", 4)
    assert_in_order()


@pytest.mark.gpu
def test_a_capture_that_code_breaks_off_and_says_nothing_of() -> None:
    graphs = ForwardGraphs(CudaCapturer(), torch.device("cuda"))

    def wait(x: torch.Tensor) -> None:
        with suppress(RuntimeError):
            torch.cuda.current_stream().synchronize()

    reason = assert_launched_by_python(graphs, "cuda", wait)
    assert reason.startswith("cannot be captured: CUDA error"), reason
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
        graphs = ForwardGraphs(CudaCapturer(), torch.device("cuda"))
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
