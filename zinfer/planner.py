"""Decides, before anything is loaded, where each block lives and which buffers stream the rest. Needs no GPU.

A pure function of the blocks, the machine's limits and the settings: it goes through the possible placements from the
best to the poorest and takes the first that the budgets hold. Blocks outside the layers (embeddings, norms, head)
become resident first: they are small and used in every pass. Without `offload_param.device` layers fill the device,
then the host, then stay on disk; ``cpu`` keeps them off the device, ``nvme`` off the host as well.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import Final

from zinfer.config import Settings
from zinfer.errors import PlanError
from zinfer.machine import MachineLimits
from zinfer.nvme.aligned import align_up
from zinfer.offload.block import Block, Home, Tier
from zinfer.offload.homes import NUM_LOADING_BUFFERS
from zinfer.offload.read_plan import plan_reads
from zinfer.units import human_bytes

_DEFAULT_NUM_SLOTS: Final = 2
_MOST_NUM_SLOTS: Final = 8  # what the hints of DeepSpeed's keys may ask for


@dataclass(frozen=True)
class Plan:
    """Homes by block index, the buffers, and the bytes of each kind of memory that they take for the whole run.

    ``slot_bytes`` and ``staging_bytes`` are of one slot; ``host_bytes`` is the most at any time, loading included;
    ``streamed_bytes`` are of the slabs that are not resident.
    """

    homes: tuple[Home, ...]
    num_slots: int
    slot_bytes: int
    num_staging: int
    staging_bytes: int
    device_bytes: int
    host_bytes: int
    pinned_bytes: int
    streamed_bytes: int

    def num_blocks(self, tier: Tier) -> int:
        return sum(home.tier is tier for home in self.homes)

    def __str__(self) -> str:
        homes = ", ".join(f"{self.num_blocks(tier)} {tier.name}" for tier in Tier)
        slots = f"{self.num_slots} slots of {human_bytes(self.slot_bytes)}"
        host = f"{human_bytes(self.host_bytes)} host ({human_bytes(self.pinned_bytes)} pinned)"
        memory = f"{human_bytes(self.device_bytes)} device, {host}"
        return f"blocks {homes}; {slots}; {human_bytes(self.streamed_bytes)} streamed a pass; memory {memory}"


def make_plan(blocks: Sequence[Block], layers: Iterable[int], limits: MachineLimits, settings: Settings) -> Plan:
    """Place every block.

    Args:
        blocks: all blocks in the model's order.
        layers: indices of those that are transformer layers.
        limits: budgets in bytes.
        settings: `offload`, `streaming` and `num_slots` are read.

    Raises:
        PlanError: a budget is too small; the message says for what, and how much is needed.
    """
    choices = _slot_choices(blocks, frozenset(layers), settings)
    for num_slots in choices:
        try:
            return _Planner(tuple(blocks), frozenset(layers), limits, settings, num_slots).plan()
        except PlanError:
            if num_slots == choices[-1]:
                raise
    raise AssertionError("there is always a choice")


def _slot_choices(blocks: Sequence[Block], layers: frozenset[int], settings: Settings) -> list[int]:
    """Numbers of slots to try: the stated one, else those down from the depth that DeepSpeed's keys hint at."""
    if settings.num_slots is not None:
        return [settings.num_slots]
    hints = settings.streaming
    largest = max((blocks[index].layout.numel for index in layers), default=1)
    num_slots = _DEFAULT_NUM_SLOTS
    if hints.prefetch_bucket_size is not None:
        num_slots = 1 + max(1, ceil(hints.prefetch_bucket_size / largest))
    if hints.max_live_parameters is not None:
        # Two slots at least: what DeepSpeed counts here is parameters, and one layer of them is one slot.
        num_slots = min(num_slots, max(_DEFAULT_NUM_SLOTS, hints.max_live_parameters // largest))
    return list(range(min(num_slots, _MOST_NUM_SLOTS), _DEFAULT_NUM_SLOTS - 1, -1))


@dataclass(frozen=True)
class _HostSide:
    """One way to keep the streamed blocks: which of them in host memory, which of those pinned, and the staging."""

    hosted: frozenset[int]
    pinned: frozenset[int]
    num_staging: int
    staging_bytes: int
    host_bytes: int
    pinned_bytes: int


@dataclass(frozen=True)
class _Planner:
    blocks: tuple[Block, ...]
    layers: frozenset[int]
    limits: MachineLimits
    settings: Settings
    num_slots: int

    def plan(self) -> Plan:
        resident = self._choose_resident()
        streamed = [block for block in self.blocks if block.index not in resident]
        host = self._choose_host_side(streamed)
        homes = tuple(self._home(block.index, resident, host) for block in self.blocks)
        return Plan(
            homes=homes,
            num_slots=min(self.num_slots, len(streamed)),
            slot_bytes=max((block.nbytes for block in streamed), default=0),
            num_staging=host.num_staging,
            staging_bytes=host.staging_bytes,
            device_bytes=self._device_bytes(resident),
            host_bytes=host.host_bytes,
            pinned_bytes=host.pinned_bytes,
            streamed_bytes=sum(block.nbytes for block in streamed),
        )

    @staticmethod
    def _home(index: int, resident: frozenset[int], host: _HostSide) -> Home:
        if index in resident:
            return Home(Tier.DEVICE)
        return Home(Tier.HOST, index in host.pinned) if index in host.hosted else Home(Tier.DISK)

    @property
    def _on_cuda(self) -> bool:
        return self.limits.device.type == "cuda"

    def _choose_resident(self) -> frozenset[int]:
        budget = self.limits.device_bytes
        needed: list[int] = []
        for resident in self._resident_choices():
            needed.append(self._device_bytes(resident))
            if needed[-1] <= budget:
                return resident
        largest = max(self.blocks, key=lambda block: block.nbytes)
        raise PlanError(
            f"zinfer.max_device_memory is {human_bytes(budget)}, too small to stream through {self.num_slots} slots: "
            f"the largest block, {largest.name}, takes {human_bytes(largest.nbytes)}. At least {min(needed)} bytes "
            f"({human_bytes(min(needed))}) are needed; raise it, or lower zinfer.num_slots"
        )

    def _resident_choices(self) -> Iterator[frozenset[int]]:
        """Sets of resident blocks, best first."""
        outer = sorted(set(range(len(self.blocks))) - self.layers, key=lambda index: self.blocks[index].nbytes)
        layers = sorted(self.layers)
        if self.settings.offload.device in (None, "none"):
            for count in range(len(layers), 0, -1):
                yield frozenset([*outer, *_spread(layers, count)])
        for count in range(len(outer), -1, -1):
            yield frozenset(outer[:count])

    def _device_bytes(self, resident: frozenset[int]) -> int:
        streamed = [block.nbytes for block in self.blocks if block.index not in resident]
        slots = min(self.num_slots, len(streamed)) * max(streamed, default=0)
        return slots + sum(self.blocks[index].nbytes for index in resident)

    def _choose_host_side(self, streamed: list[Block]) -> _HostSide:
        in_memory = [block for block in streamed if not block.extents]  # these cannot live on disk
        self._check_offload(in_memory)
        most = 0 if self.settings.offload.device == "nvme" else len(streamed)
        most_numel = self.settings.offload.max_in_cpu
        for count in range(most, len(in_memory) - 1, -1):
            side = self._host_side(streamed, self._hosted(streamed, count))
            numel = sum(self.blocks[index].layout.numel for index in side.hosted)
            if side.host_bytes <= self.limits.host_bytes and (most_numel is None or numel <= most_numel):
                break
        else:
            raise PlanError(
                f"zinfer.max_host_memory is {human_bytes(self.limits.host_bytes)}; at least {side.host_bytes} bytes "
                f"({human_bytes(side.host_bytes)}) are needed: {human_bytes(side.staging_bytes)} in each of "
                f"{side.num_staging} staging slots or what loading takes, and the weights that no file holds"
            )
        if side.pinned_bytes > self.limits.pinned_bytes:
            raise PlanError(
                f"zinfer.max_pinned_memory is {human_bytes(self.limits.pinned_bytes)}; the staging slots alone need "
                f"{side.pinned_bytes} bytes ({human_bytes(side.pinned_bytes)})"
            )
        return side

    def _check_offload(self, in_memory: list[Block]) -> None:
        """Weights that came in memory have one home when they are streamed, host memory."""
        if not in_memory:
            return
        remedy = "save the model with save_pretrained and give the folder instead"
        if self.settings.offload.device == "nvme":
            raise PlanError(
                f'zero_optimization.offload_param.device is "nvme", but the module\'s weights are in memory and in no '
                f"file to stream from; {remedy}, or set it to \"cpu\""
            )
        numel, most = sum(block.layout.numel for block in in_memory), self.settings.offload.max_in_cpu
        if most is not None and numel > most:
            raise PlanError(
                f"zero_optimization.offload_param.max_in_cpu is {most} elements, but {numel} of the module's weights "
                f"are in memory and in no file to stream from; raise it, or {remedy}"
            )

    @staticmethod
    def _hosted(streamed: list[Block], count: int) -> frozenset[int]:
        """Blocks for host memory: those that came in memory, and others spread evenly among the ones on disk."""
        fixed = [block.index for block in streamed if not block.extents]
        free = [block.index for block in streamed if block.extents]
        return frozenset([*fixed, *_spread(free, count - len(fixed))])

    def _host_side(self, streamed: list[Block], hosted: frozenset[int]) -> _HostSide:
        on_disk = {block.index for block in streamed} - hosted
        wants_pinned = self._on_cuda and self.settings.offload.pin_memory
        slab_bytes = sum(self._slab_bytes[index] for index in hosted)
        all_pinned = wants_pinned and slab_bytes <= self.limits.pinned_bytes and not on_disk
        staged = [self._read_bytes[index] for index in on_disk]
        if self._on_cuda and not all_pinned:
            staged += [self._slab_bytes[index] for index in hosted]
        staging_bytes = max(staged, default=0)
        num_staging = min(self.settings.offload.buffer_count or self.num_slots, len(streamed)) if staging_bytes else 0
        staging_total = num_staging * staging_bytes
        room = self.limits.pinned_bytes - staging_total
        pinned = frozenset(self._fitting(sorted(hosted), room) if wants_pinned else ())
        return _HostSide(
            hosted,
            pinned,
            num_staging,
            staging_bytes,
            slab_bytes + max(staging_total, self._loading_bytes(on_disk)),
            (staging_total if self._on_cuda else 0) + sum(self._slab_bytes[index] for index in pinned),
        )

    def _loading_bytes(self, on_disk: set[int]) -> int:
        """The buffers that fill resident and host slabs from disk, gone before the first pass."""
        read = [self._read_bytes[block.index] for block in self.blocks if block.extents and block.index not in on_disk]
        return min(NUM_LOADING_BUFFERS, len(read)) * max(read, default=0)

    @cached_property
    def _read_bytes(self) -> list[int]:
        """Bytes of the aligned reads that bring each block in."""
        return [plan_reads(block.extents).staging_bytes for block in self.blocks]

    @cached_property
    def _slab_bytes(self) -> list[int]:
        """Bytes that each block's slab takes in host memory, whole pages."""
        return [align_up(block.nbytes) for block in self.blocks]

    def _fitting(self, indices: list[int], room: int) -> Iterator[int]:
        for index in indices:
            room -= self._slab_bytes[index]
            if room < 0:
                return
            yield index


def _spread(items: Sequence[int], count: int) -> list[int]:
    """``count`` of the items, as evenly apart as can be."""
    return [items[place * len(items) // count] for place in range(count)]
