"""Rates of a machine, used by predictions and for shares of a ceiling."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Rates:
    """Rates of one machine with one device.

    Attributes:
        link_bytes_per_s: pinned host memory to the device.
        disk_bytes_per_s: direct reads of the checkpoint's disk, at the best block size and depth.
        host_bytes_per_s: copies within host memory, bytes copied.
        device_bytes_per_s: device memory, reads plus writes.
        flops_per_s: dense matrix products in the compute dtype.
        origin: source of the figures, for display: a measurement with its date, or a preset's name.
    """

    link_bytes_per_s: float
    disk_bytes_per_s: float
    host_bytes_per_s: float
    device_bytes_per_s: float
    flops_per_s: float
    origin: str
