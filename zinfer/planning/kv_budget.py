"""`BatchingBudget`: what continuous batching takes beside the weights, its pages and the activations of a pass.

Stated sizes are kept. For the others a pass carries as much as pays, weights keep what streaming needs, and pages take
what nothing else wants, on the device or in host memory.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from zinfer.config import Settings
from zinfer.config.settings import Batching
from zinfer.errors import ConfigError, PlanError
from zinfer.model.partition import ModelBlock
from zinfer.model.spec import KVShape, ModelSpec
from zinfer.offload.conversions import conversion_bytes
from zinfer.planning.memory import Footprint, Request, find_footprint, weight_budget
from zinfer.probe.limits import MachineLimits
from zinfer.quantization.slab_matrix import most_dequantized_bytes
from zinfer.scheduling.page_pool import PagePool
from zinfer.scheduling.queues import Order
from zinfer.scheduling.scheduler import Scheduler
from zinfer.units import human_bytes

_PAGE_SIZE: Final = 64
_PARKED_SHARE: Final = 4  # of the cache's pages, one in so many
_MOST_PARKED_BYTES: Final = 4 << 30
_DTYPES: Final = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}

_MOST_TOKENS_PER_PASS: Final = 16_384
# 16-bit weights at 4 GB/s from a disk take as long as an H200 computes 150,000 tokens with them.
_MOST_TOKENS_FROM_DISK: Final = 131_072
_LEAST_TOKENS_PER_SEQUENCE: Final = 16  # of a pass, for each sequence that runs at once: below that the card is small
_FEWEST_TOKENS_PER_PASS: Final = 1024  # that are chosen where nothing is stated
_MOST_ACTIVATION_SHARE: Final = 1 / 8  # of what is free
# Of a pass, what a layer computes at once: its matrices are dequantized once for each part.
_PART_TOKENS: Final = (16_384, 8_192, 4_096)
_MOST_PART_SHARE: Final = 1 / 16  # of what is free, for the activations of a part that is larger than the smallest
_MAX_SEQUENCES: Final = 1024
_RESIDUAL_COPIES: Final = 4  # of the residual stream: a layer's input and output, before and after joining

_KV_SHARE: Final = 0.3  # of what is left on the device, beside weights that are all resident; of what is free on a CPU
_NUM_SLOTS: Final = 3
_LEAST_KV_SHARE: Final = 0.15  # of what is left in a memory, whatever weights would like to have
_HOST_KV_SHARE: Final = 0.8  # of host memory that weights leave: staging, the outputs and others want some too
_PAGE_SLOTS_SHARE: Final = 0.3  # of what is free on the device, for slots that pages in host memory pass through


@dataclass(frozen=True)
class BatchingBudget:
    """Sizes of everything that continuous batching owns.

    Attributes:
        tokens_per_pass: most tokens of a ragged batch.
        most_part_tokens: of them, what a layer computes at once.
        max_sequences: most sequences that run at once.
        num_pages, page_size: of the cache.
        kv_dtype: of its keys and values.
        order: in which sequences that wait begin.
        lends: whether idle pages are lent to weights. On a CPU pages that were never written to take no memory, and
            are lent only where the configuration has given it to them.
        footprint: bytes that all of it takes.
        swaps_to_disk: whether pages of preempted sequences are kept on the disk once host memory has its share.
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

    @property
    def is_hosted(self) -> bool:
        """Whether pages are placed in host memory."""
        return self.footprint.host_bytes > 0

    @property
    def kv_bytes(self) -> int:
        """Bytes of all pages, in the memory where they are placed."""
        return self.footprint.host_bytes or self.footprint.kv_bytes

    @property
    def most_swapped_in_memory(self) -> int:
        """Pages of preempted sequences that host memory takes; none where pages are placed there anyway."""
        if self.is_hosted:
            return 0
        return min(self.num_pages // _PARKED_SHARE, _MOST_PARKED_BYTES // (self.kv_bytes // self.num_pages))

    @property
    def most_swapped_pages(self) -> int:
        """The same with those on the disk, as many as there are pages; what is beyond them is computed again."""
        return self.most_swapped_in_memory + (self.num_pages if self.swaps_to_disk else 0)

    def scheduler(self, window: int | None = None) -> Scheduler:
        """Make a scheduler over free pages; ``window`` is the `Scheduler`'s."""
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
    """Keep the stated sizes, and choose for the others what suits the machine.

    Args:
        spec: of the model.
        dtype: of its weights and activations.
        blocks: its weights.
        settings: among them the sizes that are stated.
        limits: of the machine.
        free_bytes: of the device, for weights and all else.
        most_tokens: of one sequence, prompt and new tokens together; None: as many as there are pages for.

    Raises:
        ConfigError: pages of a size that is no power of two.
        PlanError: not even one page fits the memory that is there for the cache, or more is stated than there is.
    """
    stated = settings.batching
    page_size = stated.kv_page_size or _PAGE_SIZE
    if page_size & (page_size - 1):
        raise ConfigError(f"zinfer.kv_page_size is {page_size}; give a power of two, such as 64")
    most = _MOST_TOKENS_PER_PASS
    if limits.on_cuda and _streams_from_disk(blocks, settings, limits, free_bytes):
        most = _MOST_TOKENS_FROM_DISK
    tokens, part_tokens, max_sequences, activation_bytes = _pass_size(
        spec.over_pages(), dtype, stated, most, free_bytes if limits.on_cuda else None
    )
    kv_dtype = _DTYPES.get(stated.kv_cache_dtype, dtype)
    if hosted := stated.kv_cache_tier == "host":
        kv_bytes = HostShare.find(blocks, settings, limits).pages_bytes(spec.kv, free_bytes, stated.kv_cache_memory)
    else:
        kv_bytes = _device_pages_bytes(blocks, settings, free_bytes, activation_bytes, on_cuda=limits.on_cuda)
    page_bytes = spec.kv.token_bytes(kv_dtype) * page_size
    num_pages = kv_bytes // page_bytes
    if stated.kv_cache_memory is None and most_tokens is not None:
        num_pages = min(num_pages, max_sequences * -(-most_tokens // page_size))
    if num_pages < 1:
        raised = "raise zinfer.kv_cache_memory, or " if stated.kv_cache_memory is not None else ""
        raise PlanError(
            f"a page of the KV cache, {page_size} tokens, takes {human_bytes(page_bytes)}, and {human_bytes(kv_bytes)} "
            f"are there for it; {raised}set zinfer.kv_page_size to less"
        )
    kv_bytes = num_pages * page_bytes
    # Of pages in host memory the device has slots.
    device_kv_bytes = kv_bytes // spec.kv.num_layers * spec.kv.num_page_slots if hosted else kv_bytes
    return BatchingBudget(
        tokens_per_pass=tokens,
        most_part_tokens=part_tokens,
        max_sequences=max_sequences,
        num_pages=num_pages,
        page_size=page_size,
        kv_dtype=kv_dtype,
        order=stated.admission_order,
        lends=not hosted and (limits.on_cuda or stated.kv_cache_memory is not None),
        footprint=Footprint(device_kv_bytes, activation_bytes, device_kv_bytes, kv_bytes if hosted else 0),
    )


def _pass_size(
    spec: ModelSpec, dtype: torch.dtype, stated: Batching, most: int, free_bytes: int | None
) -> tuple[int, int, int, int]:
    """Most tokens of a pass, of them those of a part, sequences at once, and the bytes of activations.

    Stated sizes are kept; the others are as large as pays, and smaller where a card is too small.

    Args:
        spec: of the model over pages.
        most: tokens that pay.
        free_bytes: of the device, for weights and all else; None on a CPU, where they bound nothing.
    """
    on_cuda = free_bytes is not None
    most_part_bytes = (free_bytes or 0) * _MOST_PART_SHARE
    most_bytes = math.inf if free_bytes is None else free_bytes * _MOST_ACTIVATION_SHARE

    def layer_bytes(num_rows: int, num_tokens: int) -> int:
        """Activations of a layer as transformers' modules make them, and the logits of each row."""
        return find_footprint(spec, dtype, Request(num_rows, num_tokens, 1), on_cuda=on_cuda).activation_bytes

    fitting = (count for count in _PART_TOKENS if layer_bytes(1, count) <= most_part_bytes)
    part_tokens = next(fitting, _PART_TOKENS[-1])
    while True:
        tokens = stated.tokens_per_pass or most
        sequences = min(_MAX_SEQUENCES, most // _LEAST_TOKENS_PER_SEQUENCE)
        max_sequences = min(stated.max_sequences or sequences, tokens)
        residual = _RESIDUAL_COPIES * tokens * spec.hidden * dtype.itemsize
        nbytes = residual + max(layer_bytes(1, min(tokens, part_tokens)), layer_bytes(max_sequences, 1))
        if nbytes <= most_bytes or most == _FEWEST_TOKENS_PER_PASS:
            return tokens, min(tokens, part_tokens), max_sequences, nbytes
        most //= 2


def _device_pages_bytes(
    blocks: Sequence[ModelBlock], settings: Settings, free_bytes: int, activation_bytes: int, *, on_cuda: bool
) -> int:
    """What is stated for pages, else what nothing else on the device needs."""
    if settings.batching.kv_cache_memory is not None:
        return settings.batching.kv_cache_memory
    if not on_cuda:
        return int(free_bytes * _KV_SHARE)
    left_bytes = weight_budget(free_bytes, Footprint(0, activation_bytes, 0))
    return max(left_bytes - _weights_share(blocks, settings, left_bytes), int(left_bytes * _LEAST_KV_SHARE))


def _streams_from_disk(
    blocks: Sequence[ModelBlock], settings: Settings, limits: MachineLimits, free_bytes: int
) -> bool:
    """Whether layers will stream from the disk: that was asked for, or they do not fit elsewhere, beside pages."""
    stated = settings.batching
    hosted_bytes = (stated.kv_cache_memory or 0) if stated.kv_cache_tier == "host" else 0
    most_bytes = _weights_share(blocks, settings, free_bytes) + limits.host_bytes - hosted_bytes
    return settings.offload.device == "nvme" or sum(block.block.nbytes for block in blocks) > most_bytes


def _weights_share(blocks: Sequence[ModelBlock], settings: Settings, left_bytes: int) -> int:
    """Bytes of the device that weights are to have beside pages, of ``left_bytes`` for both.

    All of them where they may be resident and leave pages their share; otherwise what is outside the layers, and what
    layers stream through: idle pages are lent to layers anyway.
    """
    plain = [block.block for block in blocks]
    dequantized_bytes = most_dequantized_bytes(plain)
    if settings.memory.max_device_memory is not None:
        return settings.memory.max_device_memory + dequantized_bytes
    total_bytes = sum(block.nbytes for block in plain)
    layer_bytes = max((block.block.nbytes for block in blocks if block.is_layer), default=0)
    slots_bytes = max(_NUM_SLOTS, settings.num_slots or 0) * layer_bytes
    outer_bytes = sum(block.block.nbytes for block in blocks if not block.is_layer)
    aside_bytes = conversion_bytes(plain, to_host=True) + dequantized_bytes
    may_stay = settings.offload.device in (None, "none")
    if may_stay and total_bytes + aside_bytes <= left_bytes * (1 - _KV_SHARE):
        return total_bytes + aside_bytes
    return min(outer_bytes + slots_bytes, total_bytes) + aside_bytes


@dataclass(frozen=True)
class HostShare:
    """Bytes of host memory for pages that are placed there.

    Attributes:
        most_bytes: that the budgets hold.
        usual_bytes: where nothing is stated: what weights leave, or a share.
    """

    most_bytes: int
    usual_bytes: int

    @classmethod
    def find(cls, blocks: Sequence[ModelBlock], settings: Settings, limits: MachineLimits) -> "HostShare":
        """Within the limits, beside a model's blocks."""
        most_bytes = min(limits.host_bytes, limits.pinned_bytes) if limits.on_cuda else limits.host_bytes
        weight_bytes = 0 if settings.offload.device == "nvme" else sum(block.block.nbytes for block in blocks)
        left_bytes = int((most_bytes - weight_bytes) * _HOST_KV_SHARE)
        return cls(most_bytes, max(left_bytes, int(most_bytes * _LEAST_KV_SHARE)))

    def pages_bytes(self, kv: KVShape, free_bytes: int, stated_bytes: int | None = None) -> int:
        """What is stated, else as much as its slots on the device, of which ``free_bytes`` are free, allow.

        Raises:
            PlanError: more is stated than there is.
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
