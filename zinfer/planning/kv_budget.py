"""`BatchingBudget`: the memory of continuous batching besides the weights: KV-cache pages and activations.

Stated sizes are kept. Otherwise passes are as large as is useful, weights get what streaming needs, and pages get the
remaining memory of the device or the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, NamedTuple

from zinfer.config import Settings
from zinfer.config.settings import Batching
from zinfer.errors import ConfigError, PlanError
from zinfer.kv_cache import MOVED_AT_ONCE_BYTES
from zinfer.model.outline import PlannedBlock
from zinfer.model.spec import KVShape, ModelSpec
from zinfer.nvme.aligned import align_up
from zinfer.offload.block import conversion_bytes, dtype_beside
from zinfer.planning.host_placement import SWAP_SHARE
from zinfer.planning.memory import Footprint, weight_budget
from zinfer.planning.pass_sizes import MOST_TOKENS_FROM_DISK, MOST_TOKENS_PER_PASS, find_pass_sizes
from zinfer.probe.limits import MachineLimits
from zinfer.sampling import MOST_PART_LOGITS
from zinfer.scheduling.page_pool import PagePool
from zinfer.scheduling.scheduler import Scheduler
from zinfer.scheduling.waiting_queue import Order
from zinfer.units import human_bytes
from zinfer.weights.slab_matrix import most_dequantized_bytes

if TYPE_CHECKING:
    import torch

PAGE_SIZE: Final = 64
_PARKED_SHARE: Final = 4  # one in four of the cache's pages
_MOST_PARKED_BYTES: Final = 4 << 30
_KV_DTYPES: Final = {"int8": "int8", "fp8": "float8_e4m3fn"}

_KV_SHARE: Final = 0.3  # of the device, beside resident weights; of free memory on a CPU
_NUM_SLOTS: Final = 3
_LEAST_KV_SHARE: Final = 0.15  # minimum share, whatever the weights need
_HOST_KV_SHARE: Final = 0.8  # of host memory left by the weights; the rest is for staging, outputs and others
_PAGE_SLOTS_SHARE: Final = 0.3  # of free device memory, for the slots of pages in host memory


@dataclass(frozen=True)
class BatchingBudget:
    """Sizes of all memory that continuous batching owns.

    Attributes:
        tokens_per_pass: maximum tokens of a ragged batch.
        most_part_tokens: maximum tokens that a layer computes at once.
        max_sequences: maximum running sequences.
        num_pages, page_size: size of the KV cache.
        kv_dtype: dtype of the KV cache.
        order: order in which waiting sequences start.
        lends: whether idle pages are lent to weights. On a CPU, pages that were never written take no memory, so they
            are lent only if the configuration states their size.
        footprint: bytes of pages and activations.
        swaps_to_disk: whether preempted sequences are swapped to disk once their share of host memory is full.
        num_sets: passes that are under way at once, as for `Scheduler`.
        most_parked: maximum pages swapped to host memory, if host memory is bounded or stages have agreed on it.
        part_logits: maximum logits that are sampled at once.
        staged_bytes: host memory through which pages are written to disk.
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
    swaps_to_disk: bool = False
    num_sets: int = 1
    most_parked: int | None = None
    part_logits: int = MOST_PART_LOGITS
    staged_bytes: int = MOVED_AT_ONCE_BYTES

    @property
    def is_hosted(self) -> bool:
        """Whether the KV cache is in host memory."""
        return self.footprint.host_bytes > 0

    @property
    def kv_bytes(self) -> int:
        """Bytes of all pages, on the device or in host memory."""
        return self.footprint.host_bytes or self.footprint.kv_bytes

    @property
    def most_swapped_in_memory(self) -> int:
        """Maximum pages swapped to host memory; 0 if the KV cache is there anyway."""
        if self.is_hosted:
            return 0
        if self.most_parked is not None:
            return self.most_parked
        return min(self.num_pages // _PARKED_SHARE, _MOST_PARKED_BYTES // (self.kv_bytes // self.num_pages))

    @property
    def most_swapped_pages(self) -> int:
        """Maximum pages swapped to host memory and disk; sequences beyond that are recomputed."""
        return self.most_swapped_in_memory + (self.num_pages if self.swaps_to_disk else 0)

    def scheduler(self, window: int | None = None) -> Scheduler:
        """Create a scheduler with all pages free; ``window`` as for `Scheduler`."""
        return Scheduler(
            PagePool(self.num_pages, self.page_size),
            token_budget=self.tokens_per_pass,
            max_sequences=self.max_sequences,
            most_swapped_pages=self.most_swapped_pages,
            order=self.order,
            window=window,
            lends=self.lends,
            num_sets=self.num_sets,
        )


class WeightSizes(NamedTuple):
    """Bytes of a model's weights.

    nbytes: of all slabs.
    layer_bytes: of the largest layer.
    outer_bytes: outside the layers.
    dequantized_bytes: of the largest quantized matrix in dequantized form.
    converting_bytes: device memory of conversions while homes are filled.
    """

    nbytes: int
    layer_bytes: int
    outer_bytes: int
    dequantized_bytes: int
    converting_bytes: int

    @classmethod
    def of(cls, blocks: Sequence[PlannedBlock]) -> WeightSizes:
        """Return those of a model's blocks."""
        plain = [block.block for block in blocks]
        return cls(
            sum(block.nbytes for block in plain),
            max((block.block.nbytes for block in blocks if block.is_layer), default=0),
            sum(block.block.nbytes for block in blocks if not block.is_layer),
            most_dequantized_bytes(plain),
            conversion_bytes(plain, to_host=True),
        )


def find_kv_dtype(stated: Batching, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the KV cache: the stated one, else ``dtype``, that of activations."""
    name = _KV_DTYPES.get(stated.kv_cache_dtype)
    return dtype if name is None else dtype_beside(dtype, name)


def find_budget(
    spec: ModelSpec,
    dtype: torch.dtype,
    weights: WeightSizes,
    settings: Settings,
    limits: MachineLimits,
    free_bytes: int,
    most_tokens: int | None,
    num_pages: int | None = None,
) -> BatchingBudget:
    """Return the budget: stated sizes are kept, the others are chosen for the machine.

    Args:
        spec: spec of the model.
        dtype: dtype of weights and activations.
        weights: of the model.
        settings: settings with the stated sizes.
        limits: budgets of the machine.
        free_bytes: free device memory, for weights and everything else; what exceeds the cap of the limits does not
            count.
        most_tokens: maximum tokens of a sequence, prompt included; None: limited only by the pages.
        num_pages: of the KV cache, as if the settings stated their bytes; None: as they state.

    Raises:
        ConfigError: the page size is not a power of two.
        PlanError: not even one page fits, or a stated size exceeds the memory.
    """
    page_size = settings.batching.kv_page_size or PAGE_SIZE
    if page_size & (page_size - 1):
        raise ConfigError(f"zinfer.kv_page_size is {page_size}; give a power of two, such as 64")
    kv_dtype = find_kv_dtype(settings.batching, dtype)
    page_bytes = spec.kv.token_bytes(kv_dtype) * page_size
    if num_pages is not None:
        settings = replace(settings, batching=replace(settings.batching, kv_cache_memory=num_pages * page_bytes))
    stated = settings.batching
    free_bytes = limits.within_cap(free_bytes)
    most = MOST_TOKENS_PER_PASS
    if limits.on_cuda and _streams_from_disk(weights, settings, limits, free_bytes):
        most = MOST_TOKENS_FROM_DISK
    hosted = stated.kv_cache_tier == "host"
    size = find_pass_sizes(
        spec.over_pages(),
        dtype,
        stated,
        most,
        free_bytes,
        is_bounded=_is_bounded(limits),
        on_cuda=limits.on_cuda,
        replays=limits.on_cuda and settings.cuda_graph is not False and not hosted,
    )
    kv_bytes = _kv_bytes(spec, weights, settings, limits, free_bytes, size.activation_bytes)
    num_pages = kv_bytes // page_bytes
    if stated.kv_cache_memory is None and most_tokens is not None:
        num_pages = min(num_pages, size.max_sequences * -(-most_tokens // page_size))
    if num_pages < 1:
        raised = "raise zinfer.kv_cache_memory, or " if stated.kv_cache_memory is not None else ""
        raise PlanError(
            f"a page of the KV cache, {page_size} tokens, takes {human_bytes(page_bytes)}, but only "
            f"{human_bytes(kv_bytes)} are available; {raised}lower zinfer.kv_page_size"
        )
    kv_bytes = num_pages * page_bytes
    # The device has only slots for pages in host memory.
    device_kv_bytes = kv_bytes // spec.kv.num_layers * spec.kv.num_page_slots if hosted else kv_bytes
    budget = BatchingBudget(
        tokens_per_pass=size.tokens,
        most_part_tokens=size.part_tokens,
        max_sequences=size.max_sequences,
        part_logits=size.part_logits,
        num_pages=num_pages,
        page_size=page_size,
        kv_dtype=kv_dtype,
        order="arrival" if stated.admission_order == "auto" else stated.admission_order,
        lends=not hosted and (limits.on_cuda or stated.kv_cache_memory is not None),
        footprint=Footprint(device_kv_bytes, size.activation_bytes, device_kv_bytes, kv_bytes if hosted else 0),
    )
    return budget if settings.memory.max_host_memory is None else _swapping_within(limits.host_bytes, budget, settings)


def _kv_bytes(
    spec: ModelSpec,
    weights: WeightSizes,
    settings: Settings,
    limits: MachineLimits,
    free_bytes: int,
    activation_bytes: int,
) -> int:
    """Return the bytes for pages: stated ones, or what the tier's memory leaves beside weights and activations."""
    stated = settings.batching
    if stated.kv_cache_tier == "host":
        return HostShare.find(weights, settings, limits).pages_bytes(spec.kv, free_bytes, stated.kv_cache_memory)
    if stated.kv_cache_memory is not None:
        return stated.kv_cache_memory
    if not _is_bounded(limits):
        return int(free_bytes * _KV_SHARE)
    left_bytes = weight_budget(free_bytes, Footprint(0, activation_bytes, 0), on_cuda=limits.on_cuda)
    weights_bytes = _weights_share(weights, settings, left_bytes)
    return max(left_bytes - weights_bytes, int(left_bytes * _LEAST_KV_SHARE))


def _is_bounded(limits: MachineLimits) -> bool:
    """Whether the device has a memory of its own, or a cap."""
    return limits.on_cuda or limits.cap_bytes is not None


def _swapping_within(host_bytes: int, budget: BatchingBudget, settings: Settings) -> BatchingBudget:
    """Return the budget with at most a share of a stated host memory for swapped pages and what writes them to disk."""
    page_bytes = budget.kv_bytes // budget.num_pages
    most_bytes, staged = host_bytes // SWAP_SHARE, 0
    if settings.offload.nvme_path is not None:
        staged = max(align_up(page_bytes), min(MOVED_AT_ONCE_BYTES, most_bytes // 2))
    elif not budget.most_swapped_in_memory:
        return budget
    left_bytes = max(0, most_bytes - staged)
    most_parked = min(budget.most_swapped_in_memory, left_bytes // page_bytes)
    footprint = replace(budget.footprint, swap_bytes=most_parked * page_bytes + staged)
    return replace(budget, most_parked=most_parked, footprint=footprint, staged_bytes=staged or MOVED_AT_ONCE_BYTES)


def _streams_from_disk(weights: WeightSizes, settings: Settings, limits: MachineLimits, free_bytes: int) -> bool:
    """Return whether layers will stream from disk, because of the settings or for lack of memory."""
    stated = settings.batching
    hosted_bytes = (stated.kv_cache_memory or 0) if stated.kv_cache_tier == "host" else 0
    most_bytes = _weights_share(weights, settings, free_bytes) + limits.host_bytes - hosted_bytes
    return settings.offload.device == "nvme" or weights.nbytes > most_bytes


def _weights_share(weights: WeightSizes, settings: Settings, left_bytes: int) -> int:
    """Return the device bytes for weights, of ``left_bytes`` for weights and pages.

    All weights, if they may be resident and leave enough for pages. Otherwise the blocks outside the layers, and slots
    to stream layers through; idle pages are lent to layers anyway.
    """
    if settings.memory.max_weight_memory is not None:
        return settings.memory.max_weight_memory + weights.dequantized_bytes
    slots_bytes = max(_NUM_SLOTS, settings.num_slots or 0) * weights.layer_bytes
    aside_bytes = weights.converting_bytes + weights.dequantized_bytes
    may_stay = settings.offload.device in (None, "none")
    if may_stay and weights.nbytes + aside_bytes <= left_bytes * (1 - _KV_SHARE):
        return weights.nbytes + aside_bytes
    return min(weights.outer_bytes + slots_bytes, weights.nbytes) + aside_bytes


@dataclass(frozen=True)
class HostShare:
    """Host memory for KV-cache pages.

    Attributes:
        most_bytes: maximum within the budgets.
        usual_bytes: default size: what the weights leave, or a minimum share.
    """

    most_bytes: int
    usual_bytes: int

    @classmethod
    def find(cls, weights: WeightSizes, settings: Settings, limits: MachineLimits) -> HostShare:
        """Compute the share beside a model's weights."""
        most_bytes = min(limits.host_bytes, limits.pinned_bytes) if limits.on_cuda else limits.host_bytes
        weight_bytes = 0 if settings.offload.device == "nvme" else weights.nbytes
        left_bytes = int((most_bytes - weight_bytes) * _HOST_KV_SHARE)
        return cls(most_bytes, max(left_bytes, int(most_bytes * _LEAST_KV_SHARE)))

    def pages_bytes(self, kv: KVShape, free_bytes: int, stated_bytes: int | None = None) -> int:
        """Return the stated bytes, else as many as their slots on the device allow.

        Args:
            free_bytes: free device memory.

        Raises:
            PlanError: the stated size exceeds the budgets.
        """
        if stated_bytes is None:
            slots_share = kv.num_page_slots / kv.num_layers
            return min(self.usual_bytes, int(free_bytes * _PAGE_SLOTS_SHARE / slots_share))
        if stated_bytes > self.most_bytes:
            raise PlanError(
                f'zinfer.kv_cache_memory is {human_bytes(stated_bytes)}, and zinfer.kv_cache_tier is "host", but '
                f"zinfer.max_host_memory and max_pinned_memory leave {human_bytes(self.most_bytes)}; lower "
                "zinfer.kv_cache_memory, or raise them"
            )
        return stated_bytes
