"""What a machine moves and computes in a second: the denominators of every prediction and every share of a ceiling."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Rates:
    """Ceilings of one machine, of one device.

    Attributes:
        link_bytes_per_s: pinned host memory to the device.
        disk_bytes_per_s: direct reads of the disk that holds the checkpoint, at the best block size and depth.
        host_bytes_per_s: copies between two places in host memory, bytes copied.
        device_bytes_per_s: device memory, bytes read and written together.
        flops_per_s: dense matrix products in the dtype that is computed in.
        origin: where the figures come from, for people: a measurement with its date, or a preset's name.
    """

    link_bytes_per_s: float
    disk_bytes_per_s: float
    host_bytes_per_s: float
    device_bytes_per_s: float
    flops_per_s: float
    origin: str
