"""Rates of a machine, used by predictions and for shares of a ceiling."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

EXCHANGES: Final[Mapping[str, Mapping[str, Any]]] = {
    "NVIDIA H200": {
        "gather_bytes_per_s": 400e9,
        "all_reduce_bytes_per_s": 286e9,
        "links_together": ((2, 110.9e9), (4, 183e9)),
    }
}
"""By card, between those of a host that NVLink joins: gathers of four (350 to 437 GB/s), an all-reduce of 128 MiB of
two, and the links of two and four at once, as measured. Nothing is assumed of exchanges among other cards."""


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
        gather_bytes_per_s: slabs that each of several ranks makes whole from all their ranges; None: not known.
        all_reduce_bytes_per_s: tensors that several ranks sum up; None: not known.
        links_together: (number of links of one host, bytes per second of all of them at once), by number.
        launch_s: in which Python launches a plain layer (`zinfer.probe.measure.measure_launch`); 0: not known.
        shares_host: whether the host itself computes what it launches.
    """

    link_bytes_per_s: float
    disk_bytes_per_s: float
    host_bytes_per_s: float
    device_bytes_per_s: float
    flops_per_s: float
    origin: str
    gather_bytes_per_s: float | None = None
    all_reduce_bytes_per_s: float | None = None
    links_together: tuple[tuple[int, float], ...] = ()
    launch_s: float = 0.0
    shares_host: bool = False

    @property
    def joins_devices(self) -> bool:
        """Whether devices have links between them, faster than the host's: then they can map each other's memory."""
        return self.gather_bytes_per_s is not None and self.gather_bytes_per_s > 2 * self.link_bytes_per_s

    def shared(self, num_local: int, num_copies: float) -> "Rates":
        """Return what a rank has of these rates beside the others of its host.

        Args:
            num_local: ranks of the host, whose links are busy at once. Beyond the most that were measured together,
                each link keeps that share.
            num_copies: copies of the weights that they stream from the host's one disk and memory.
        """
        measured = [(count, total) for count, total in sorted(self.links_together) if count <= num_local]
        each = min([self.link_bytes_per_s, *(total / count for count, total in measured[-1:])])
        return replace(
            self,
            link_bytes_per_s=each,
            disk_bytes_per_s=self.disk_bytes_per_s / num_copies,
            host_bytes_per_s=self.host_bytes_per_s / num_copies,
        )

    def times(self, count: float) -> "Rates":
        """Return the rates of so many devices that compute and copy as one; the host's stay."""
        gather = self.gather_bytes_per_s
        return replace(
            self,
            link_bytes_per_s=count * self.link_bytes_per_s,
            device_bytes_per_s=count * self.device_bytes_per_s,
            flops_per_s=count * self.flops_per_s,
            gather_bytes_per_s=None if gather is None else count * gather,
        )
