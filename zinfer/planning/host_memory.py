"""Host memory for keys and values that are at home there, and how much of it they take."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from zinfer.config import Settings
from zinfer.errors import PlanError
from zinfer.model.partition import ModelBlock
from zinfer.model.spec import KVShape
from zinfer.probe.limits import MachineLimits
from zinfer.units import human_bytes

_SHARE: Final = 0.8  # of host memory that weights leave: staging, the outputs and others want some too
_LEAST_SHARE: Final = 0.15  # of host memory, whatever weights would like to have
_SLOTS_SHARE: Final = 0.3  # of what is free on the device


@dataclass(frozen=True)
class HostRoom:
    """Bytes of host memory for keys and values that are at home there.

    Attributes:
        most_bytes: that the budgets hold.
        usual_bytes: where nothing is stated: what weights leave, or a share.
    """

    most_bytes: int
    usual_bytes: int

    @classmethod
    def find(cls, blocks: Sequence[ModelBlock], settings: Settings, limits: MachineLimits) -> "HostRoom":
        """Within the limits, beside a model's blocks."""
        most_bytes = min(limits.host_bytes, limits.pinned_bytes) if limits.on_cuda else limits.host_bytes
        weight_bytes = 0 if settings.offload.device == "nvme" else sum(block.block.nbytes for block in blocks)
        left_bytes = int((most_bytes - weight_bytes) * _SHARE)
        return cls(most_bytes, max(left_bytes, int(most_bytes * _LEAST_SHARE)))

    def usual_pages_bytes(self, kv: KVShape, free_bytes: int) -> int:
        """Where nothing is stated: more would want slots that are too large for the device.

        Args:
            free_bytes: of the device.
        """
        slots_share = kv.num_page_slots / kv.num_layers
        return min(self.usual_bytes, int(free_bytes * _SLOTS_SHARE / slots_share))

    def pages_bytes(self, kv: KVShape, free_bytes: int, stated_bytes: int | None) -> int:
        """What is stated, else what is usual.

        Raises:
            PlanError: more is stated than there is.
        """
        if stated_bytes is None:
            return self.usual_pages_bytes(kv, free_bytes)
        if stated_bytes > self.most_bytes:
            raise PlanError(
                f'zinfer.kv_cache_memory is {human_bytes(stated_bytes)}, and zinfer.kv_cache_tier is "host", but '
                f"zinfer.max_host_memory and max_pinned_memory leave {human_bytes(self.most_bytes)}; lower "
                "zinfer.kv_cache_memory, or raise them"
            )
        return stated_bytes
