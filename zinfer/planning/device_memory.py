"""How the device is shared between weights and the pages of keys and values that are at home there."""

from collections.abc import Sequence
from typing import Final

from zinfer.config import Settings
from zinfer.model.partition import ModelBlock
from zinfer.offload.conversions import conversion_bytes
from zinfer.planning.footprint import Footprint, weight_budget
from zinfer.probe.limits import MachineLimits
from zinfer.quantization.slab_matrix import most_dequantized_bytes

_KV_SHARE: Final = 0.3  # of what is left, beside weights that are all resident; of what is free on a CPU
_NUM_SLOTS: Final = 3
_LEAST_SHARE: Final = 0.15  # of what is left, whatever weights would like to have


def pages_bytes(
    blocks: Sequence[ModelBlock], settings: Settings, free_bytes: int, activation_bytes: int, *, on_cuda: bool
) -> int:
    """What is stated for pages, else what nothing else needs.

    Args:
        free_bytes: of the device, for weights and all else.
        activation_bytes: of a pass.
    """
    if settings.batching.kv_cache_memory is not None:
        return settings.batching.kv_cache_memory
    if not on_cuda:
        return int(free_bytes * _KV_SHARE)
    left_bytes = weight_budget(free_bytes, Footprint(0, activation_bytes, 0))
    return max(left_bytes - _weights_room(blocks, settings, left_bytes), int(left_bytes * _LEAST_SHARE))


def streams_from_disk(blocks: Sequence[ModelBlock], settings: Settings, limits: MachineLimits, free_bytes: int) -> bool:
    """Whether layers will stream from the disk: that was asked for, or they do not fit elsewhere, beside pages.

    Args:
        free_bytes: of the device, for weights and all else.
    """
    stated = settings.batching
    hosted_bytes = (stated.kv_cache_memory or 0) if stated.kv_cache_tier == "host" else 0
    room_bytes = _weights_room(blocks, settings, free_bytes) + limits.host_bytes - hosted_bytes
    return settings.offload.device == "nvme" or sum(block.block.nbytes for block in blocks) > room_bytes


def _weights_room(blocks: Sequence[ModelBlock], settings: Settings, left_bytes: int) -> int:
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
