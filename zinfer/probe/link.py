"""The link between host memory and devices: each way alone, both at once, and several devices at once.

On a machine without CUDA the device is the host: its link is a host copy, and there is one way only.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Literal

import torch

from zinfer.offload.host_memory import HostBuffer
from zinfer.probe.clock import PerSecond, median_seconds, settle
from zinfer.probe.memory import measure_copy

LinkKind = Literal["pinned copies", "pageable copies", "host copies"]


@dataclass(frozen=True)
class LinkRates:
    """Bytes a second of copies of ``nbytes``: to the device, from it (None on a CPU), and the sum of both at once.

    ``kind`` is "pageable copies" where pinning was refused.
    """

    kind: LinkKind
    nbytes: int
    to_device_bytes_per_s: PerSecond
    from_device_bytes_per_s: PerSecond | None
    both_ways_bytes_per_s: PerSecond | None


@dataclass(frozen=True)
class LinksTogether:
    """The sum over the first ``num_devices`` devices, each copying from host memory of its own at the same time."""

    num_devices: int
    to_device_bytes_per_s: PerSecond


def measure_link(device: torch.device, nbytes: int, *, repeats: int) -> LinkRates:
    """Take two host and two device buffers of ``nbytes`` (a multiple of 4096), and give them back."""
    if device.type != "cuda":
        return LinkRates("host copies", nbytes, measure_copy(nbytes, repeats=repeats), None, None)
    with ExitStack() as owned:
        source, target = (owned.enter_context(closing(HostBuffer(nbytes, pin=True))) for _ in range(2))
        owned.callback(settle, [device])  # no registration ends while a copy is under way, after a failure too
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
    """Two of several devices at once, and all of them; nothing for a single one."""
    counts = sorted({2, len(devices)}) if len(devices) > 1 else []
    return tuple(
        LinksTogether(count, count * nbytes / _median_together(devices[:count], nbytes, repeats)) for count in counts
    )


def _median_together(devices: Sequence[torch.device], nbytes: int, repeats: int) -> float:
    with ExitStack() as owned:
        push = _enter_pushes(owned, devices, nbytes)
        return median_seconds(push, devices, repeats=repeats)


def _enter_pushes(owned: ExitStack, devices: Sequence[torch.device], nbytes: int) -> Callable[[], None]:
    """One call of the result enqueues a copy to each device; the buffers last as long as ``owned``."""
    hosts = [owned.enter_context(closing(HostBuffer(nbytes, pin=device.type == "cuda"))) for device in devices]
    owned.callback(settle, devices)
    places = [torch.empty(nbytes, dtype=torch.uint8, device=device) for device in devices]

    def push() -> None:
        for host, place in zip(hosts, places, strict=True):
            place.copy_(host.tensor, non_blocking=True)

    return push


def copy_until(done: Callable[[], bool], devices: Sequence[torch.device], nbytes: int) -> None:
    """Keep every link busy until ``done``: an idle link lowers its own generation, and would be read so."""
    with ExitStack() as owned:
        push = _enter_pushes(owned, devices, nbytes)
        while not done():
            push()
            settle(devices)
