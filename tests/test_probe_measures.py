"""The measurements of `zinfer.probe`, with little memory, on each device that there is."""

import math
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from probe_support import KIB, MIB, TINY

from zinfer.nvme.aligned import ALIGNMENT_BYTES
from zinfer.offload.host_memory import HostBuffer
from zinfer.probe import measure
from zinfer.probe.measure import (
    copy_until,
    matmul_dtype,
    measure_device,
    measure_link,
    measure_matmul,
    measure_memory,
    measure_together,
    median_seconds,
)
from zinfer.probe.sizes import FULL_CPU, FULL_CUDA, full_sizes, quick_sizes


def figures(value: object) -> Iterator[float]:
    """Every rate in a tree of dataclasses as `asdict` gives it."""
    if isinstance(value, float):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from figures(inner)


@pytest.fixture
def buffers(monkeypatch: pytest.MonkeyPatch) -> list[HostBuffer]:
    """Every host buffer that a measurement makes."""
    made: list[HostBuffer] = []

    class Noted(HostBuffer):
        def __init__(self, nbytes: int, **options: Any) -> None:
            super().__init__(nbytes, **options)
            made.append(self)

    monkeypatch.setattr(measure, "HostBuffer", Noted)
    return made


def test_the_median_leaves_out_the_first_run(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    durations_s = iter([100.0, 5.0, 1.0, 2.0])

    def work() -> None:
        nonlocal now_s
        now_s += next(durations_s)

    monkeypatch.setattr("zinfer.probe.measure.time.perf_counter", lambda: now_s)
    assert median_seconds(work, repeats=3) == 2.0
    assert next(durations_s, None) is None


def test_every_figure_of_a_device_is_a_rate(device: str, buffers: list[HostBuffer]) -> None:
    found = measure_device(torch.device(device), "a name", TINY)
    rates = list(figures(asdict(found)))
    assert all(rate > 0 and math.isfinite(rate) for rate in rates)
    assert found.link.nbytes == TINY.link_bytes
    if device == "cpu":
        assert (found.link.kind, found.dtype, len(rates)) == ("host copies", "float32", 4)
    else:
        assert (found.link.kind, len(rates)) == ("pinned copies", 6)
        assert found.dtype in ("bfloat16", "float16")
        assert len(buffers) == 2
    assert not any(buffer.pinned for buffer in buffers)


@pytest.mark.gpu
def test_a_pinned_link_is_a_link(buffers: list[HostBuffer]) -> None:
    device = torch.device("cuda", 0)
    found = measure_link(device, 64 * MIB, repeats=3)
    assert found.kind == "pinned copies"
    assert found.to_device_bytes_per_s > 1e9
    assert found.from_device_bytes_per_s is not None
    assert found.from_device_bytes_per_s > 1e9
    assert found.both_ways_bytes_per_s is not None
    slower = min(found.to_device_bytes_per_s, found.from_device_bytes_per_s)
    assert found.both_ways_bytes_per_s > 0.5 * slower
    assert len(buffers) == 2
    assert not any(buffer.pinned for buffer in buffers)
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    for buffer in buffers:  # CUDA refuses a second registration of the same pages
        assert int(runtime.cudaHostRegister(buffer.tensor.data_ptr(), buffer.nbytes, 0)) == 0
        assert int(runtime.cudaHostUnregister(buffer.tensor.data_ptr())) == 0


def test_host_memory_is_measured_and_torchs_threads_are_as_before() -> None:
    former = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = measure_memory(MIB, repeats=2)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(former)
    assert found.num_threads == 2
    rates = list(figures(asdict(found)))
    assert len(rates) == 2
    assert all(rate > 0 and math.isfinite(rate) for rate in rates)


def test_several_links_are_measured_at_once(device: str, buffers: list[HostBuffer]) -> None:
    """One device stands for several here: the copies go to places of their own."""
    several = [torch.device(device)] * 3
    found = measure_together(several, 64 * KIB, repeats=2)
    assert [together.num_devices for together in found] == [2, 3]
    assert all(together.to_device_bytes_per_s > 0 for together in found)
    assert len(buffers) == 2 + 3
    assert not any(buffer.pinned for buffer in buffers)
    assert measure_together(several[:1], 64 * KIB, repeats=2) == ()
    assert [together.num_devices for together in measure_together(several[:2], 64 * KIB, repeats=1)] == [2]


def test_links_are_kept_busy_until_told(device: str, buffers: list[HostBuffer]) -> None:
    answers = iter([False, False, True])
    copy_until(lambda: next(answers), [torch.device(device)], 64 * KIB)
    assert next(answers, None) is None
    assert not any(buffer.pinned for buffer in buffers)


def test_a_failed_copy_leaves_nothing_registered(
    device: str, buffers: list[HostBuffer], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> bool:
        raise RuntimeError("the device is lost")

    with pytest.raises(RuntimeError, match="lost"):
        copy_until(fail, [torch.device(device)], 64 * KIB)
    assert len(buffers) == 1
    assert not buffers[0].pinned


def test_twice_the_products_take_twice_the_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the time held at one second, the rate is the number of operations."""
    monkeypatch.setattr("zinfer.probe.measure.median_seconds", lambda *_, **__: 1.0)
    cpu = torch.device("cpu")
    dtype = matmul_dtype(cpu)
    assert measure_matmul(cpu, 32, dtype, num_matmuls=1, repeats=1) == 2 * 32**3
    assert measure_matmul(cpu, 32, dtype, num_matmuls=6, repeats=1) == 6 * 2 * 32**3


def test_sizes_stay_within_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    plenty = full_sizes([cpu])
    assert plenty.link_bytes <= FULL_CPU.link_bytes
    monkeypatch.setattr("zinfer.probe.cgroups.free_group_bytes", lambda: 100 * MIB)
    scarce = full_sizes([cpu])
    for nbytes in (scarce.link_bytes, scarce.host_bytes, scarce.device_bytes):
        assert 0 < nbytes <= 10 * MIB
        assert nbytes % ALIGNMENT_BYTES == 0
    four = FULL_CUDA.bounded([cpu] * 4)
    assert 4 * four.link_bytes <= four.host_bytes <= 10 * MIB
    assert replace(scarce, link_bytes=1).bounded([cpu]).link_bytes == ALIGNMENT_BYTES
    assert quick_sizes(cpu).link_bytes < FULL_CPU.link_bytes
