"""The host's part of a plan: the blocks in host memory, which of them are pinned, and the staging ring."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Final

from zinfer.config import Settings
from zinfer.errors import PlanError
from zinfer.nvme.aligned import align_up
from zinfer.offload.block import Block
from zinfer.offload.chunks import covered_bytes
from zinfer.offload.partition import WHOLE, Partition
from zinfer.probe.limits import MachineLimits
from zinfer.units import human_bytes

# Staging rings to choose from, best first: (bytes of a slot, slots). 256 MiB outlast any hiccup of a 4 GB/s disk, and
# 16 MiB copies already run at the link's speed; smaller rings are for little memory.
_RINGS: Final = ((16 << 20, 16), (16 << 20, 8), (8 << 20, 8), (4 << 20, 8), (4 << 20, 4), (1 << 20, 4), (1 << 20, 2))
_LEAST_STAGING_BYTES: Final = 8192  # a page, and one that an element may straddle into
SWAP_SHARE: Final = 8  # the swapped KV cache takes at most an eighth of a stated budget
_STAGING_SHARE: Final = 8  # the ring takes at most an eighth of a budget that is too small for all blocks


@dataclass(frozen=True)
class HostSide:
    """A placement of the streamed blocks: those in host memory, those of them pinned, and the staging ring."""

    hosted: frozenset[int]
    pinned: frozenset[int]
    num_staging: int
    staging_bytes: int
    host_bytes: int
    pinned_bytes: int


@dataclass(frozen=True)
class HostSizes:
    """Sizes of blocks and of staging rings in host memory, whatever the budgets.

    Args:
        blocks: all blocks: while homes are filled, all of them pass through the ring.
        partition: the ranks that share the blocks; each has its range of every one.
    """

    blocks: Sequence[Block]
    settings: Settings
    partition: Partition = WHOLE

    def rings(self) -> Iterator[tuple[int, int]]:
        """Yield candidate rings: the one hinted at in the settings, then the usual ones."""
        numel = self.settings.offload.buffer_size
        if numel is not None and self.blocks:
            itemsize = max(tensor.dtype.itemsize for block in self.blocks for tensor in block.layout.tensors)
            slot_bytes = max(_LEAST_STAGING_BYTES, align_up(numel * itemsize))
            yield slot_bytes, max(2, min(_RINGS[0][1], _RINGS[0][0] * _RINGS[0][1] // slot_bytes))
        yield from _RINGS

    def sized(self, ring: tuple[int, int], largest: int) -> tuple[int, int]:
        """Return bytes and number of staging slots for transfers of at most ``largest`` bytes."""
        if not largest:
            return 0, 0
        slot_bytes, num_slots = ring
        return max(_LEAST_STAGING_BYTES, min(slot_bytes, largest)), self.settings.offload.buffer_count or num_slots

    @cached_property
    def max_ring_bytes(self) -> int:
        """Maximum bytes of staging slots, whichever blocks stream."""
        largest = max([self.largest_read, *self.slab_bytes], default=0)
        return max(slot_bytes * num for slot_bytes, num in (self.sized(ring, largest) for ring in self.rings()))

    @cached_property
    def largest_read(self) -> int:
        """Bytes of the aligned reads of the block with the most; among ranks, of the largest range's."""
        if self.partition.size == 1:
            return max((block.covered_bytes for block in self.blocks), default=0)
        reads = (map(covered_bytes, self.partition.all_reads(block)) for block in self.blocks)
        return max(map(max, reads), default=0)

    @cached_property
    def slab_bytes(self) -> list[int]:
        """Bytes of each block's slab, or one range of it, in host memory, rounded up to pages."""
        return [align_up(self.partition.range_bytes(block.nbytes)) for block in self.blocks]


@dataclass(frozen=True)
class HostPlanner:
    """Places as many streamed blocks in host memory as fit, and spreads the others, on disk, evenly among them.

    Args:
        streamed: the blocks that are not resident, in the model's order.
        sizes: of all blocks.
        limits: the budgets.
    """

    streamed: Sequence[Block]
    sizes: HostSizes
    limits: MachineLimits

    @property
    def settings(self) -> Settings:
        """Those of the sizes."""
        return self.sizes.settings

    def choose(self) -> HostSide:
        """Return the best placement within the budgets.

        Raises:
            PlanError: a budget is too small, or the settings allow no home for weights that are in no file.
        """
        self._check_offload()
        share = min(self.limits.host_bytes, self.limits.pinned_bytes) // _STAGING_SHARE
        modest, last = None, None
        for ring in self.sizes.rings():
            if (side := self._best_side(ring)) is None:
                continue
            if len(side.hosted) == len(self.streamed):
                return side
            if modest is None and side.num_staging * side.staging_bytes <= share:
                modest = side
            last = side
            if modest is not None and self._most_hosted < len(self.streamed):
                break  # with no ring all of them fit
        if last is None:
            raise self._too_little_host_memory()
        return modest or last

    @cached_property
    def _in_memory(self) -> list[Block]:
        """Streamed blocks that no file holds in streamable form: they cannot stay on disk."""
        return [block for block in self.streamed if not block.extents]

    def _best_side(self, ring: tuple[int, int]) -> HostSide | None:
        """Return the placement with the most blocks in host memory; None if too few fit."""
        least = len(self._in_memory)
        most = least if self.settings.offload.device == "nvme" else len(self.streamed)
        most_numel = self.settings.offload.max_in_cpu
        for count in range(min(most, self._most_hosted), least - 1, -1):
            side = self._host_side(self._hosted(count), ring)
            fits = side.host_bytes <= self.limits.host_bytes and side.pinned_bytes <= self.limits.pinned_bytes
            if fits and (most_numel is None or self._numel(side.hosted) <= most_numel):
                return side
        return None

    def _numel(self, hosted: frozenset[int]) -> int:
        return sum(self.sizes.blocks[index].layout.numel for index in hosted)

    @cached_property
    def _most_hosted(self) -> int:
        """More streamed blocks than this do not fit the host memory, not even the smallest ones without a ring."""
        given_bytes = self.limits.host_bytes - sum(self.sizes.slab_bytes[block.index] for block in self._in_memory)
        free_bytes = sorted(self.sizes.slab_bytes[block.index] for block in self.streamed if block.extents)
        return len(self._in_memory) + bisect_right(list(accumulate(free_bytes)), given_bytes)

    def _too_little_host_memory(self) -> PlanError:
        least = self._host_side(self._hosted(len(self._in_memory)), _RINGS[-1])
        needs = f"{least.num_staging} staging slots of {human_bytes(least.staging_bytes)}"
        key, what = "max_pinned_memory", "the host memory that may be pinned"
        given, needed, kv_bytes = self.limits.pinned_bytes, least.pinned_bytes, self.limits.host_kv_bytes
        if least.host_bytes > self.limits.host_bytes:
            key, what = "max_host_memory", "the host memory for weights"
            given, needed = self.limits.host_bytes, least.host_bytes
            needs += ", and the weights that no file holds"
            if (swap_bytes := self.limits.swap_bytes) is not None:
                needs += f", and {human_bytes(swap_bytes)} for the KV cache of preempted sequences"
                # Its share grows with the budget, up to what it needs.
                grown = -(-needed * SWAP_SHARE // (SWAP_SHARE - 1))
                given, needed = given + swap_bytes, max(grown, needed + swap_bytes)
        if kv_bytes:
            needs += f", and {human_bytes(kv_bytes)} of KV cache; lower zinfer.kv_cache_memory"
        stated_bytes = getattr(self.settings.memory, key)
        if stated_bytes is not None:
            what = f"zinfer.{key}"
            if given + kv_bytes != stated_bytes:
                what = f"what there is of {what} ({human_bytes(stated_bytes)})"
        return PlanError(
            f"{what} is {human_bytes(given + kv_bytes)}; at least {needed + kv_bytes} bytes "
            f"({human_bytes(needed + kv_bytes)}) are needed: {needs}"
        )

    def _check_offload(self) -> None:
        """Raise PlanError if weights that are in no file would have to stream from disk."""
        if not self._in_memory:
            return
        if any(block.conversion for block in self._in_memory):
            what = "are quantized while they are loaded"
            remedy = "write a quantized checkpoint with `zinfer quantize` and give that"
        else:
            what = "of the module are in memory"
            remedy = "save the model with save_pretrained and give the folder instead"
        if self.settings.offload.device == "nvme":
            remedy = f"set zero_optimization.offload_param.nvme_path, a folder to write them to, {remedy}"
            raise PlanError(
                f'zero_optimization.offload_param.device is "nvme", but weights {what} and in no file to stream from; '
                f'{remedy}, or set the device to "cpu"'
            )
        numel, most = sum(block.layout.numel for block in self._in_memory), self.settings.offload.max_in_cpu
        if most is not None and numel > most:
            raise PlanError(
                f"zero_optimization.offload_param.max_in_cpu is {most} elements, but {numel} weights {what} and in no "
                f"file to stream from; raise it, or {remedy}"
            )

    def _hosted(self, count: int) -> frozenset[int]:
        """Return ``count`` blocks for host memory: those in no file, and others spread evenly."""
        fixed = [block.index for block in self._in_memory]
        free = [block.index for block in self.streamed if block.extents]
        return frozenset([*fixed, *spread(free, count - len(fixed))])

    def _host_side(self, hosted: frozenset[int], ring: tuple[int, int]) -> HostSide:
        wants_pinned = self.limits.on_cuda and self.settings.offload.pin_memory
        slab_bytes = [self.sizes.slab_bytes[index] for index in sorted(hosted)]
        largest = self.sizes.largest_read  # filling the homes uses the ring too
        if self.limits.on_cuda and not (wants_pinned and sum(slab_bytes) <= self.limits.pinned_bytes):
            largest = max([largest, *slab_bytes])
        staging_bytes, num_staging = self.sizes.sized(ring, largest)
        staging_total = num_staging * staging_bytes
        most_pinned = self.limits.pinned_bytes - staging_total if wants_pinned else -1
        num_pinned = sum(total <= most_pinned for total in accumulate(slab_bytes))
        return HostSide(
            hosted=hosted,
            pinned=frozenset(sorted(hosted)[:num_pinned]),
            num_staging=num_staging,
            staging_bytes=staging_bytes,
            host_bytes=sum(slab_bytes) + staging_total,
            pinned_bytes=(staging_total if self.limits.on_cuda else 0) + sum(slab_bytes[:num_pinned]),
        )


def spread(items: Sequence[int], count: int) -> list[int]:
    """Return ``count`` of the items, spaced as evenly as possible."""
    return [items[place * len(items) // count] for place in range(count)]
