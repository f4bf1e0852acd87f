"""Sizes of the measurements: enough for steady figures, within free memory and a reasonable time."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch

from zinfer.config import Settings
from zinfer.nvme.aligned import ALIGNMENT_BYTES, align_down
from zinfer.probe.limits import allocatable_bytes, find_limits

_MEMORY_SHARE: Final = 8  # measurements use two or three buffers, so they stay below half of free memory


@dataclass(frozen=True)
class Sizes:
    """Sizes of one probe.

    ``link_bytes``, ``host_bytes`` and ``device_bytes`` are per buffer, ``file_bytes`` is the temporary file's size. A
    timed run computes ``num_matmuls`` square products, because a GPU holds its highest clock only for some
    milliseconds. ``depths`` are numbers of requests in flight.
    """

    link_bytes: int
    host_bytes: int
    device_bytes: int
    matmul_width: int
    num_matmuls: int
    repeats: int
    block_sizes: tuple[int, ...] = (1 << 20, 4 << 20, 16 << 20)
    read_depths: tuple[int, ...] = (1, 4, 8, 16, 32)
    write_depths: tuple[int, ...] = (1, 8)
    seconds_per_point: float = 0.5
    file_bytes: int = 4 << 30

    def bounded(self, devices: Sequence[torch.device]) -> "Sizes":
        """Limit the sizes to the free memory of host and devices."""
        host_bytes = find_limits(Settings(device="cpu")).host_bytes // _MEMORY_SHARE
        cuda = [device for device in devices if device.type == "cuda"]
        free_bytes = [allocatable_bytes(device) for device in cuda]
        device_bytes = min(free_bytes) // _MEMORY_SHARE if free_bytes else host_bytes
        return replace(
            self,
            link_bytes=_at_most(self.link_bytes, min(host_bytes // len(devices), device_bytes)),
            host_bytes=_at_most(self.host_bytes, host_bytes),
            device_bytes=_at_most(self.device_bytes, device_bytes),
        )


def _at_most(wanted: int, most: int) -> int:
    return max(ALIGNMENT_BYTES, align_down(min(wanted, most)))


FULL_CUDA: Final = Sizes(
    link_bytes=1 << 30, host_bytes=2 << 30, device_bytes=1 << 30, matmul_width=8192, num_matmuls=200, repeats=5
)
FULL_CPU: Final = Sizes(
    link_bytes=256 << 20, host_bytes=512 << 20, device_bytes=256 << 20, matmul_width=2048, num_matmuls=1, repeats=5
)
# For runs without a recorded probe: about a second with a GPU, a third of one without.
HURRIED_CUDA: Final = Sizes(
    link_bytes=128 << 20,
    host_bytes=64 << 20,
    device_bytes=256 << 20,
    matmul_width=8192,
    num_matmuls=60,
    repeats=3,
    seconds_per_point=0.4,
)
HURRIED_CPU: Final = replace(
    HURRIED_CUDA,
    link_bytes=32 << 20,
    host_bytes=32 << 20,
    device_bytes=32 << 20,
    matmul_width=512,
    num_matmuls=1,
    seconds_per_point=0.15,
)


def full_sizes(devices: Sequence[torch.device]) -> Sizes:
    """Return the sizes of `zinfer probe`: about 30 s with a GPU."""
    return (FULL_CUDA if devices[0].type == "cuda" else FULL_CPU).bounded(devices)


def quick_sizes(device: torch.device) -> Sizes:
    """Return the sizes for a run without a recorded probe."""
    return (HURRIED_CUDA if device.type == "cuda" else HURRIED_CPU).bounded([device])
