"""Measure host memory, the link and a device: medians of several runs, with the devices idle before and after each.

Without CUDA the device is the host: its link is a host copy in one direction.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Annotated, Final, Literal

import torch
from pydantic import Field
from torch import nn
from torch.nn import functional

from zinfer.offload.host_memory import HostBuffer
from zinfer.probe.card import PcieLink
from zinfer.probe.rates import Rates
from zinfer.probe.sizes import Sizes

Measured = Annotated[float, Field(gt=0, allow_inf_nan=False)]
"""A measured figure: positive and finite."""

_PLAIN_WIDTH: Final = 64
_PLAIN_TOKENS: Final = 8
_NUM_PLAIN_LAYERS: Final = 24

LinkKind = Literal["pinned copies", "pageable copies", "host copies"]


def settle(devices: Sequence[torch.device]) -> None:
    """Wait for all work enqueued on the devices."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def median_seconds(work: Callable[[], object], devices: Sequence[torch.device] = (), *, repeats: int) -> float:
    """Return the seconds of a call: the median of ``repeats`` after one warm-up."""
    work()
    seconds = []
    for _ in range(repeats):
        settle(devices)
        begin_s = time.perf_counter()
        work()
        settle(devices)
        seconds.append(time.perf_counter() - begin_s)
    return statistics.median(seconds)


@dataclass(frozen=True)
class MemoryRates:
    """Bytes copied per second with one thread and with torch's ``num_threads``."""

    num_threads: int
    copy_one_bytes_per_s: Measured
    copy_all_bytes_per_s: Measured


def measure_memory(nbytes: int, *, repeats: int) -> MemoryRates:
    """Measure both over buffers of ``nbytes``; restores torch's number of threads."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        copy_one = measure_copy(nbytes, repeats=repeats)
    finally:
        torch.set_num_threads(num_threads)
    return MemoryRates(num_threads, copy_one, measure_copy(nbytes, repeats=repeats))


def measure_copy(nbytes: int, *, repeats: int) -> float:
    """Return the bytes copied per second within host memory, with torch's present number of threads."""
    source = torch.ones(nbytes, dtype=torch.uint8)
    target = torch.empty_like(source)
    return nbytes / median_seconds(lambda: target.copy_(source), repeats=repeats)


@dataclass(frozen=True)
class LinkRates:
    """Bytes per second of copies of ``nbytes``: to the device, from it (None on a CPU), and the sum of both at once.

    ``kind`` is "pageable copies" if pinning was refused.
    """

    kind: LinkKind
    nbytes: int
    to_device_bytes_per_s: Measured
    from_device_bytes_per_s: Measured | None
    both_ways_bytes_per_s: Measured | None


@dataclass(frozen=True)
class LinksTogether:
    """Total rate of the first ``num_devices`` devices, each copying from its own host memory at the same time."""

    num_devices: int
    to_device_bytes_per_s: Measured


def measure_link(device: torch.device, nbytes: int, *, repeats: int) -> LinkRates:
    """Measure the link with two host and two device buffers of ``nbytes`` (a multiple of 4096)."""
    if device.type != "cuda":
        return LinkRates("host copies", nbytes, measure_copy(nbytes, repeats=repeats), None, None)
    with ExitStack() as owned:
        source, target = (owned.enter_context(closing(HostBuffer(nbytes, pin=True))) for _ in range(2))
        owned.callback(settle, [device])  # also after failures: never unpin memory while a copy runs
        places = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
        there = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        back = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

        def push() -> None:
            with torch.cuda.stream(there):
                places[0].copy_(source.tensor, non_blocking=True)

        def pull() -> None:
            with torch.cuda.stream(back):
                target.tensor.copy_(places[1], non_blocking=True)

        def both() -> None:
            push()
            pull()

        settle([device])
        push_s, pull_s, both_s = (median_seconds(work, [device], repeats=repeats) for work in (push, pull, both))
        kind: LinkKind = "pinned copies" if source.pinned and target.pinned else "pageable copies"
        return LinkRates(kind, nbytes, nbytes / push_s, nbytes / pull_s, 2 * nbytes / both_s)


def measure_together(devices: Sequence[torch.device], nbytes: int, *, repeats: int) -> tuple[LinksTogether, ...]:
    """Measure two devices at once, and all of them; returns nothing for a single device."""
    found = []
    for count in sorted({2, len(devices)}) if len(devices) > 1 else []:
        with ExitStack() as owned:
            push = _enter_pushes(owned, devices[:count], nbytes)
            seconds = median_seconds(push, devices[:count], repeats=repeats)
        found.append(LinksTogether(count, count * nbytes / seconds))
    return tuple(found)


def _enter_pushes(owned: ExitStack, devices: Sequence[torch.device], nbytes: int) -> Callable[[], None]:
    """Return a function that enqueues a copy to each device; ``owned`` owns the buffers."""
    hosts = [owned.enter_context(closing(HostBuffer(nbytes, pin=device.type == "cuda"))) for device in devices]
    owned.callback(settle, devices)
    places = [torch.empty(nbytes, dtype=torch.uint8, device=device) for device in devices]

    def push() -> None:
        for host, place in zip(hosts, places, strict=True):
            place.copy_(host.tensor, non_blocking=True)

    return push


def copy_until(done: Callable[[], bool], devices: Sequence[torch.device], nbytes: int) -> None:
    """Keep every link busy until ``done``: an idle link reports a lower PCIe generation."""
    with ExitStack() as owned:
        push = _enter_pushes(owned, devices, nbytes)
        while not done():
            push()
            settle(devices)


def matmul_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype that models use: fp32 on a CPU, bf16 on a GPU that supports it, else fp16."""
    if device.type != "cuda":
        return torch.float32
    with torch.cuda.device(device):
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16


def measure_device_copy(device: torch.device, nbytes: int, *, repeats: int) -> float:
    """Return the bytes read and written per second, added up."""
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * nbytes / median_seconds(lambda: target.copy_(source), [device], repeats=repeats)


def measure_matmul(device: torch.device, width: int, dtype: torch.dtype, *, num_matmuls: int, repeats: int) -> float:
    """Return the FLOP/s of ``num_matmuls`` consecutive products of random [width, width] matrices (2 width^3 each).

    Random, because GPUs reach higher clocks with zeros.
    """
    matrix = torch.randn(width, width, device=device, dtype=dtype)
    product = torch.empty_like(matrix)

    def multiply() -> None:
        for _ in range(num_matmuls):
            torch.mm(matrix, matrix, out=product)

    return 2 * width**3 * num_matmuls / median_seconds(multiply, [device], repeats=repeats)


def measure_launch(device: torch.device, *, repeats: int) -> float:
    """Return the seconds in which Python launches a plain decoder layer of torch's own modules, for a few tokens.

    A GPU computes it sooner than that, a CPU meanwhile.
    """
    layer = _PlainLayer().to(device).eval().requires_grad_(False)
    tokens = torch.zeros(_PLAIN_TOKENS, _PLAIN_WIDTH, device=device)

    @torch.inference_mode()
    def launch() -> None:
        hidden = tokens
        for _ in range(_NUM_PLAIN_LAYERS):
            hidden = layer(hidden)

    return median_seconds(launch, [device], repeats=repeats) / _NUM_PLAIN_LAYERS


class _PlainLayer(nn.Module):
    """Two norms, four projections around an attention, and a feed-forward, as narrow as can be."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(_PLAIN_WIDTH) for _ in range(2))
        self.projections = nn.ModuleList(nn.Linear(_PLAIN_WIDTH, _PLAIN_WIDTH) for _ in range(7))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        query, key, value, out, gate, up, down = self.projections
        normed = self.norms[0](hidden)
        heads = [each(normed).view(-1, 1, _PLAIN_WIDTH).transpose(0, 1) for each in (query, key, value)]
        attended = functional.scaled_dot_product_attention(*heads)
        hidden = hidden + out(attended.transpose(0, 1).reshape(-1, _PLAIN_WIDTH))
        normed = self.norms[1](hidden)
        summed: torch.Tensor = hidden + down(functional.silu(gate(normed)) * up(normed))
        return summed


@dataclass(frozen=True)
class DeviceFindings:
    """Findings of a GPU, or of the CPU. ``copy_bytes_per_s``: device memory, reads plus writes; ``flops_per_s``: dense
    products in ``dtype``; ``pcie``: None if unknown; ``launch_s``: of `measure_launch`."""

    name: str
    link: LinkRates
    copy_bytes_per_s: Measured
    flops_per_s: Measured
    dtype: str
    pcie: PcieLink | None
    launch_s: Measured

    def rates(self, *, host_bytes_per_s: float, disk_bytes_per_s: float, origin: str) -> Rates:
        """Return the planner's rates, with those of host memory and a disk."""
        return Rates(
            link_bytes_per_s=self.link.to_device_bytes_per_s,
            disk_bytes_per_s=disk_bytes_per_s,
            host_bytes_per_s=host_bytes_per_s,
            device_bytes_per_s=self.copy_bytes_per_s,
            flops_per_s=self.flops_per_s,
            origin=origin,
            launch_s=self.launch_s,
            shares_host=self.link.kind == "host copies",
        )


def measure_device(device: torch.device, name: str, sizes: Sizes, pcie: PcieLink | None = None) -> DeviceFindings:
    """Measure a device's link, memory and matrix products; frees the memory it used."""
    dtype = matmul_dtype(device)
    try:
        return DeviceFindings(
            name=name,
            link=measure_link(device, sizes.link_bytes, repeats=sizes.repeats),
            copy_bytes_per_s=measure_device_copy(device, sizes.device_bytes, repeats=sizes.repeats),
            flops_per_s=measure_matmul(
                device, sizes.matmul_width, dtype, num_matmuls=sizes.num_matmuls, repeats=sizes.repeats
            ),
            dtype=str(dtype).removeprefix("torch."),
            pcie=pcie,
            launch_s=measure_launch(device, repeats=sizes.repeats),
        )
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()  # else torch caches it, and the next plan finds less free memory
