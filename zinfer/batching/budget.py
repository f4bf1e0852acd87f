"""What continuous batching takes of the device beside the weights: pages, and the activations of a pass."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from transformers import PretrainedConfig

from zinfer.batching.admission_queue import Order
from zinfer.batching.host_room import HostRoom
from zinfer.batching.kv_shape import num_page_slots, read_kv_shape
from zinfer.batching.pages import PagePool
from zinfer.batching.scheduler import Scheduler
from zinfer.config import Settings
from zinfer.config.settings import Batching
from zinfer.cut import ModelBlock
from zinfer.errors import ConfigError, PlanError
from zinfer.offload.conversions import conversion_bytes
from zinfer.planning.footprint import Footprint, find_footprint, weight_budget
from zinfer.planning.model_shape import ModelShape, read_shape
from zinfer.planning.request import Request
from zinfer.quantization.slab_matrix import most_dequantized_bytes
from zinfer.units import human_bytes

_KV_SHARE: Final = 0.3  # of what is left, beside weights that are all resident; of what is free on a CPU
_NUM_SLOTS: Final = 3
_LEAST_SHARE: Final = 0.15  # of what is left, whatever weights would like to have
_MOST_TOKENS_PER_PASS: Final = 16_384
# 16-bit weights at 4 GB/s from a disk take as long as an H200 computes 150,000 tokens with them.
_MOST_TOKENS_FROM_DISK: Final = 131_072
_LEAST_TOKENS_PER_SEQUENCE: Final = 16  # of a pass, for each text that runs at once: short of that the card is small
_FEWEST_TOKENS_PER_PASS: Final = 1024  # that are chosen where nothing is stated
_MOST_ACTIVATION_SHARE: Final = 1 / 8  # of what is free
# Of a pass, what a layer computes at once: its matrices are dequantized once for each part.
_PART_TOKENS: Final = (16_384, 8_192, 4_096)
_MOST_PART_SHARE: Final = 1 / 16  # of what is free, for the activations of a part that is larger than the smallest
_MAX_SEQUENCES: Final = 1024
_PAGE_SIZE: Final = 64
_PARKED_SHARE: Final = 4  # of the cache's pages, one in so many
_MOST_PARKED_BYTES: Final = 4 << 30
_RESIDUAL_COPIES: Final = 4  # of the residual stream: a layer's input and output, before and after joining
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
    def most_parked_in_memory(self) -> int:
        """Pages of texts that had to make room, in host memory: none where that is what they had to make room in."""
        if self.is_hosted:
            return 0
        return min(self.num_pages // _PARKED_SHARE, _MOST_PARKED_BYTES // (self.kv_bytes // self.num_pages))

    @property
    def most_parked_pages(self) -> int:
        """The same with those on the disk, as many as there are pages; what is beyond them is computed again."""
        return self.most_parked_in_memory + (self.num_pages if self.parks_on_disk else 0)

    def scheduler(self, window: int | None = None) -> Scheduler:
        """A new one over pages that nobody has; ``window`` is the `Scheduler`'s."""
        return Scheduler(
            PagePool(self.num_pages, self.page_size),
            token_budget=self.tokens_per_pass,
            max_sequences=self.max_sequences,
            most_parked_pages=self.most_parked_pages,
            order=self.order,
            window=window,
            lends=self.lends,
        )


def find_budget(
    config: PretrainedConfig,
    dtype: torch.dtype,
    free_bytes: int,
    stated: Batching,
    most_tokens: int | None,
    room: Callable[[int], int],
    host: HostRoom,
    *,
    on_cuda: bool,
    from_disk: bool = False,
) -> BatchingBudget:
    """The stated sizes, and for the others what suits the device: pages take what nothing else needs.

    Args:
        config: of the model.
        dtype: of its weights and activations.
        free_bytes: of the device, for weights and all else.
        stated: by the configuration.
        most_tokens: of one text, prompt and new tokens together; None: as many as there are pages for.
        room: `weights_room` of the model.
        host: for pages that are stated to be at home in host memory.
        on_cuda: whether the device is one.
        from_disk: whether layers will stream from the disk.

    Raises:
        ConfigError: pages of a size that is no power of two.
        PlanError: not even one page fits the memory that is there for the cache, or more is stated than there is.
    """
    page_size = stated.kv_page_size or _PAGE_SIZE
    if page_size & (page_size - 1):
        raise ConfigError(f"zinfer.kv_page_size is {page_size}; give a power of two, such as 64")
    most = _MOST_TOKENS_FROM_DISK if from_disk and on_cuda else _MOST_TOKENS_PER_PASS
    shape = _batched_shape(config)
    part_bytes = free_bytes * _MOST_PART_SHARE if on_cuda else 0
    part_tokens = next((n for n in _PART_TOKENS if _part_bytes(shape, dtype, n) <= part_bytes), _PART_TOKENS[-1])
    tokens_per_pass, max_sequences, activation_bytes = _pass_sizes(
        shape, dtype, stated, most, part_tokens, free_bytes * _MOST_ACTIVATION_SHARE if on_cuda else math.inf
    )
    kv_dtype = _DTYPES.get(stated.kv_cache_dtype, dtype)
    kept = read_kv_shape(config)
    page_bytes = kept.token_bytes(kv_dtype) * page_size
    hosted = stated.kv_cache_tier == "host"
    if hosted:
        kv_bytes = host.pages_bytes(kept, free_bytes, stated.kv_cache_memory)
    else:
        kv_bytes = _device_bytes(stated, free_bytes, activation_bytes, room, on_cuda=on_cuda)
    num_pages = kv_bytes // page_bytes
    if stated.kv_cache_memory is None and most_tokens is not None:
        num_pages = min(num_pages, max_sequences * -(-most_tokens // page_size))
    if num_pages < 1:
        raise PlanError(
            f"a page of the KV cache, {page_size} tokens, takes {human_bytes(page_bytes)}, and {human_bytes(kv_bytes)} "
            "are there for it; raise zinfer.kv_cache_memory or lower zinfer.kv_page_size"
        )
    kv_bytes = num_pages * page_bytes
    footprint = Footprint(kv_bytes, activation_bytes, kv_bytes)
    if hosted:
        slots_bytes = kv_bytes // kept.num_layers * num_page_slots(kept.num_layers)
        footprint = Footprint(slots_bytes, activation_bytes, slots_bytes, host_bytes=kv_bytes)
    return BatchingBudget(
        tokens_per_pass=tokens_per_pass,
        most_part_tokens=min(tokens_per_pass, part_tokens),
        max_sequences=max_sequences,
        num_pages=num_pages,
        page_size=page_size,
        kv_dtype=kv_dtype,
        order=stated.admission_order,
        lends=not hosted and (on_cuda or stated.kv_cache_memory is not None),
        footprint=footprint,
    )


def _device_bytes(
    stated: Batching, free_bytes: int, activation_bytes: int, room: Callable[[int], int], *, on_cuda: bool
) -> int:
    """For pages on the device: what nothing else needs."""
    if stated.kv_cache_memory is not None:
        return stated.kv_cache_memory
    if not on_cuda:
        return int(free_bytes * _KV_SHARE)
    left_bytes = weight_budget(free_bytes, Footprint(0, activation_bytes, 0))
    return max(left_bytes - room(left_bytes), int(left_bytes * _LEAST_SHARE))


def weights_room(blocks: Sequence[ModelBlock], settings: Settings, left_bytes: int) -> int:
    """Bytes of the device that weights are to have beside pages.

    All of them where they may be resident and leave pages their share; otherwise what lies outside the layers, and what
    layers stream through: pages that no text needs are lent to layers anyway.

    Args:
        left_bytes: for both.
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


def streams_from_disk(blocks: Sequence[ModelBlock], settings: Settings, device_bytes: int, host_bytes: int) -> bool:
    """Whether layers will stream from the disk: that was asked for, or they do not fit elsewhere, beside pages.

    Args:
        device_bytes: of the device, for weights and all else.
        host_bytes: of the host, for weights.
    """
    room = weights_room(blocks, settings, device_bytes) + host_bytes
    return settings.offload.device == "nvme" or sum(block.block.nbytes for block in blocks) > room


def _pass_sizes(
    shape: ModelShape, dtype: torch.dtype, stated: Batching, tokens: int, part_tokens: int, most_bytes: float
) -> tuple[int, int, int]:
    """Tokens of a pass, texts at once, and the bytes of activations: fewer where a card is too small for many."""
    while True:
        tokens_per_pass = stated.tokens_per_pass or tokens
        sequences = min(_MAX_SEQUENCES, tokens // _LEAST_TOKENS_PER_SEQUENCE)
        max_sequences = min(stated.max_sequences or sequences, tokens_per_pass)
        nbytes = _activation_bytes(shape, dtype, tokens_per_pass, part_tokens, max_sequences)
        if nbytes <= most_bytes or tokens == _FEWEST_TOKENS_PER_PASS:
            return tokens_per_pass, max_sequences, nbytes
        tokens //= 2


def _batched_shape(config: PretrainedConfig) -> ModelShape:
    """The model's shape over pages: attention makes no scores, and latent attention no keys and values of its heads.

    There queries and outputs are as wide as latents, which are there twice, plain and joined with the turned part.
    """
    shape, kept = replace(read_shape(config), is_eager=False, is_uneven=False), read_kv_shape(config)
    if not kept.values_in_keys:
        return shape
    return replace(shape, expanded=shape.num_heads * (kept.key_dim + 2 * kept.value_dim))


def _activation_bytes(shape: ModelShape, dtype: torch.dtype, tokens: int, part_tokens: int, max_sequences: int) -> int:
    """A part's activations, the residual stream of the pass, and the logits."""
    part_bytes = _part_bytes(shape, dtype, min(tokens, part_tokens))
    logits = find_footprint(shape, dtype, Request(max_sequences, 1, 1), on_cuda=False)
    residual = _RESIDUAL_COPIES * tokens * shape.hidden * dtype.itemsize
    return max(part_bytes, logits.activation_bytes) + residual


def _part_bytes(shape: ModelShape, dtype: torch.dtype, tokens: int) -> int:
    """Activations of a layer as transformers' modules make them.

    Experts are not copied: that is what transformers' `generate` does, of which nothing runs here.
    """
    return find_footprint(shape, dtype, Request(1, tokens, 1), on_cuda=False).activation_bytes
