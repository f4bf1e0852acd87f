"""What continuous batching takes of the device beside the weights: pages, and the activations of a pass."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from zinfer.config import Settings
from zinfer.errors import ConfigError, PlanError
from zinfer.model.partition import ModelBlock
from zinfer.model.spec import KVShape, ModelSpec
from zinfer.planning.device_memory import pages_bytes, streams_from_disk
from zinfer.planning.footprint import Footprint
from zinfer.planning.host_memory import HostRoom
from zinfer.planning.pass_size import PassRoom
from zinfer.probe.limits import MachineLimits
from zinfer.scheduling.page_pool import PagePool
from zinfer.scheduling.scheduler import Scheduler
from zinfer.scheduling.waiting_queue import Order
from zinfer.units import human_bytes

_PAGE_SIZE: Final = 64
_PARKED_SHARE: Final = 4  # of the cache's pages, one in so many
_MOST_PARKED_BYTES: Final = 4 << 30
_DTYPES: Final = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


@dataclass(frozen=True)
class BatchingBudget:
    """Sizes of everything that continuous batching owns.

    Attributes:
        tokens_per_pass: most tokens of a ragged batch.
        most_part_tokens: of them, what a layer computes at once.
        max_sequences: most texts that run at once.
        num_pages, page_size: of the cache.
        kv_dtype: of its keys and values.
        order: in which texts that wait begin.
        lends: whether pages that no text needs are lent to weights. On a CPU pages that were never written to take no
            memory, and are lent only where the configuration has given it to them.
        footprint: bytes that all of it takes.
        parks_on_disk: whether pages of texts that had to make room are kept on the disk once host memory has its share.
    """

    tokens_per_pass: int
    most_part_tokens: int
    max_sequences: int
    num_pages: int
    page_size: int
    kv_dtype: torch.dtype
    order: Order
    lends: bool
    footprint: Footprint
    parks_on_disk: bool = False

    @property
    def is_hosted(self) -> bool:
        """Whether pages are at home in host memory."""
        return self.footprint.host_bytes > 0

    @property
    def kv_bytes(self) -> int:
        """Of all pages, where they are at home."""
        return self.footprint.host_bytes or self.footprint.kv_bytes

    @property
    def most_swapped_in_memory(self) -> int:
        """Pages of texts that had to make room, in host memory: none where that is what they had to make room in."""
        if self.is_hosted:
            return 0
        return min(self.num_pages // _PARKED_SHARE, _MOST_PARKED_BYTES // (self.kv_bytes // self.num_pages))

    @property
    def most_swapped_pages(self) -> int:
        """The same with those on the disk, as many as there are pages; what is beyond them is computed again."""
        return self.most_swapped_in_memory + (self.num_pages if self.parks_on_disk else 0)

    def scheduler(self, window: int | None = None) -> Scheduler:
        """A new one over pages that nobody has; ``window`` is the `Scheduler`'s."""
        return Scheduler(
            PagePool(self.num_pages, self.page_size),
            token_budget=self.tokens_per_pass,
            max_sequences=self.max_sequences,
            most_swapped_pages=self.most_swapped_pages,
            order=self.order,
            window=window,
            lends=self.lends,
        )


def find_budget(
    spec: ModelSpec,
    dtype: torch.dtype,
    blocks: Sequence[ModelBlock],
    settings: Settings,
    limits: MachineLimits,
    free_bytes: int,
    most_tokens: int | None,
) -> BatchingBudget:
    """The stated sizes, and for the others what suits the machine: pages take what nothing else needs.

    Args:
        spec: of the model.
        dtype: of its weights and activations.
        blocks: its weights.
        settings: among them the sizes that are stated.
        limits: of the machine.
        free_bytes: of the device, for weights and all else.
        most_tokens: of one text, prompt and new tokens together; None: as many as there are pages for.

    Raises:
        ConfigError: pages of a size that is no power of two.
        PlanError: not even one page fits the memory that is there for the cache, or more is stated than there is.
    """
    stated = settings.batching
    page_size = stated.kv_page_size or _PAGE_SIZE
    if page_size & (page_size - 1):
        raise ConfigError(f"zinfer.kv_page_size is {page_size}; give a power of two, such as 64")
    from_disk = streams_from_disk(blocks, settings, limits, free_bytes)
    room = PassRoom.find(spec, dtype, stated, free_bytes, on_cuda=limits.on_cuda, from_disk=from_disk)
    kv_dtype, kept = _DTYPES.get(stated.kv_cache_dtype, dtype), spec.kv
    if hosted := stated.kv_cache_tier == "host":
        kv_bytes = HostRoom.find(blocks, settings, limits).pages_bytes(kept, free_bytes, stated.kv_cache_memory)
    else:
        kv_bytes = pages_bytes(blocks, settings, free_bytes, room.activation_bytes, on_cuda=limits.on_cuda)
    page_bytes = kept.token_bytes(kv_dtype) * page_size
    num_pages = kv_bytes // page_bytes
    if stated.kv_cache_memory is None and most_tokens is not None:
        num_pages = min(num_pages, room.max_sequences * -(-most_tokens // page_size))
    if num_pages < 1:
        raised = "raise zinfer.kv_cache_memory, or " if stated.kv_cache_memory is not None else ""
        raise PlanError(
            f"a page of the KV cache, {page_size} tokens, takes {human_bytes(page_bytes)}, and {human_bytes(kv_bytes)} "
            f"are there for it; {raised}set zinfer.kv_page_size to less"
        )
    return BatchingBudget(
        tokens_per_pass=room.tokens,
        most_part_tokens=room.part_tokens,
        max_sequences=room.max_sequences,
        num_pages=num_pages,
        page_size=page_size,
        kv_dtype=kv_dtype,
        order=stated.admission_order,
        lends=not hosted and (limits.on_cuda or stated.kv_cache_memory is not None),
        footprint=_footprint(num_pages * page_bytes, room.activation_bytes, kept, hosted=hosted),
    )


def _footprint(kv_bytes: int, activation_bytes: int, kv: KVShape, *, hosted: bool) -> Footprint:
    """Of pages and activations; of pages in host memory the device has slots."""
    if not hosted:
        return Footprint(kv_bytes, activation_bytes, kv_bytes)
    slots_bytes = kv_bytes // kv.num_layers * kv.num_page_slots
    return Footprint(slots_bytes, activation_bytes, slots_bytes, host_bytes=kv_bytes)
