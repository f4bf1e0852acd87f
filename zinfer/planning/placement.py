"""Choose the home of each block and the buffers that stream the rest, before anything is loaded. Needs no GPU.

A pure function of the blocks, the machine's limits and the settings. It tries the possible placements from the best to
the worst and returns the first that fits the budgets. Blocks outside the layers (embeddings, norms, head) become
resident first: they are small and used in every pass. Without `offload_param.device` layers fill the device, then the
host, and the rest stays on disk; ``cpu`` keeps them off the device, ``nvme`` off the host too.

Among ranks as many layers as possible are on the devices, each divided among them; memory that is then left has whole
layers on every rank, which need no gathers.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from itertools import accumulate
from math import ceil
from typing import Final

from zinfer.config import Settings
from zinfer.errors import PlanError
from zinfer.offload.block import Block, Home, Tier, conversion_bytes
from zinfer.offload.partition import WHOLE, Partition
from zinfer.planning.host_placement import HostPlanner, HostSide, HostSizes, spread
from zinfer.probe.limits import MachineLimits
from zinfer.units import human_bytes

_DEFAULT_NUM_SLOTS: Final = 2
_MIXED_NUM_SLOTS: Final = 3  # one in use, one filling from host memory, one filling from disk
_GATHERING_NUM_SLOTS: Final = 5  # limit for blocks that ranks have on their devices; see `Plan.useful_slots`
_MOST_NUM_SLOTS: Final = 8  # limit for the hints of DeepSpeed's keys


@dataclass(frozen=True)
class Plan:
    """Homes by block index, buffers, and the bytes of each kind of memory for the whole run.

    ``slot_bytes`` and ``staging_bytes`` are per slot; ``host_bytes`` is the peak, loading included; ``streamed_bytes``
    are the slabs that are not resident; each of ``num_ranks`` copies one range of them, and keeps one in its memory.
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
    num_ranks: int = 1

    @property
    def is_mixed(self) -> bool:
        """Whether blocks stream from host memory and from disk."""
        return self.num_blocks(Tier.HOST) > 0 and self.num_blocks(Tier.DISK) > 0

    @property
    def is_on_devices(self) -> bool:
        """Whether nothing streams but what ranks have of each other."""
        return self.num_blocks(Tier.DEVICE) == len(self.homes)

    @cached_property
    def useful_slots(self) -> int:
        """Number of slots that keeps disk and link busy.

        Blocks that the ranks have on their devices pass through slots, too, to be gathered. While one block that
        streams is gathered and used, the next one must be on its way: there has to be a slot for each block between.
        """
        gathered = sum(home.tier is Tier.DEVICE and home.shared for home in self.homes)
        streamed = len(self.homes) - self.num_blocks(Tier.DEVICE)
        between = ceil(gathered / streamed) if streamed else 0
        return max(_DEFAULT_NUM_SLOTS + between, _MIXED_NUM_SLOTS if self.is_mixed else 0)

    def num_blocks(self, tier: Tier) -> int:
        """Return the number of blocks whose home is the tier."""
        return sum(home.tier is tier for home in self.homes)

    def __str__(self) -> str:
        homes = ", ".join(f"{self.num_blocks(tier)} {tier.name}" for tier in Tier)
        slots = f"{self.num_slots} slots of {human_bytes(self.slot_bytes)}"
        host = f"{human_bytes(self.host_bytes)} host ({human_bytes(self.pinned_bytes)} pinned)"
        memory = f"{human_bytes(self.device_bytes)} device, {host}"
        streamed = f"{human_bytes(self.streamed_bytes)} streamed a pass"
        shared = f" by {self.num_ranks} ranks together" if self.num_ranks > 1 else ""
        return f"blocks {homes}; {slots}; {streamed}{shared}; memory {memory}"


def make_plan(
    blocks: Sequence[Block],
    layers: Iterable[int],
    limits: MachineLimits,
    settings: Settings,
    partition: Partition = WHOLE,
) -> Plan:
    """Place every block; as `Placer`, for one budget.

    Args:
        limits: budgets in bytes.

    Raises:
        PlanError: a budget is too small; says for what, and how much is needed.
    """
    return Placer(blocks, layers, settings, partition).place(limits)


class Placer:
    """Places the blocks of a model within any budgets, and keeps what does not depend on them.

    Args:
        blocks: all blocks in the model's order.
        layers: indices of the transformer layers.
        settings: uses `offload`, `streaming` and `num_slots`.
        partition: the ranks that share the blocks, each with the same budgets.
    """

    def __init__(
        self, blocks: Sequence[Block], layers: Iterable[int], settings: Settings, partition: Partition = WHOLE
    ) -> None:
        self._blocks, self._layers = tuple(blocks), frozenset(layers)
        self._settings, self._partition = settings, partition
        self._planners: dict[tuple[int, bool], _Planner] = {}

    def place(self, limits: MachineLimits) -> Plan:
        """Place every block within the budgets; the same plan object for the same placement. Raises as `make_plan`."""
        states_depth = _states_depth(self._settings)
        least, most = self._slot_range
        shallow = self._plan(least, limits)
        if not states_depth:
            most = min(most, shallow.useful_slots)
        for num_slots in range(most, least, -1):
            try:
                deep = self._plan(num_slots, limits)
            except PlanError:  # of fewer slots there is a plan
                continue
            if states_depth or num_slots <= deep.useful_slots:
                return deep
        return shallow

    @cached_property
    def _slot_range(self) -> tuple[int, int]:
        return _slot_range(self._blocks, self._layers, self._settings)

    def _plan(self, num_slots: int, limits: MachineLimits) -> Plan:
        key = num_slots, limits.on_cuda
        if key not in self._planners:
            self._planners[key] = _Planner(
                self._blocks, self._layers, self._settings, num_slots, self._partition, limits.on_cuda
            )
        return self._planners[key].plan(limits)


@cache  # there are few, and a search for sizes makes thousands of them
def _home(tier: Tier, *, pinned: bool = False, shared: bool = False) -> Home:
    return Home(tier, pinned, shared)


def _states_depth(settings: Settings) -> bool:
    return settings.num_slots is not None or settings.streaming.prefetch_bucket_size is not None


def _slot_range(blocks: Sequence[Block], layers: frozenset[int], settings: Settings) -> tuple[int, int]:
    """Return the fewest and the most slots to try: the stated number, else up to the depth that DeepSpeed's keys hint
    at, else up to the most that may be of use."""
    if settings.num_slots is not None:
        return settings.num_slots, settings.num_slots
    hints = settings.streaming
    largest = max((blocks[index].layout.numel for index in layers), default=1)
    most = _GATHERING_NUM_SLOTS
    if hints.prefetch_bucket_size is not None:
        most = 1 + max(1, ceil(hints.prefetch_bucket_size / largest))
    if hints.max_live_parameters is not None:
        # DeepSpeed counts parameters here; one layer of them is one slot. At least two are needed.
        most = min(most, max(_DEFAULT_NUM_SLOTS, hints.max_live_parameters // largest))
    return _DEFAULT_NUM_SLOTS, min(most, _MOST_NUM_SLOTS)


@lru_cache(maxsize=8)  # a search plans one model hundreds of times
def _resident_sets(
    enclosing: tuple[int, ...],
    outer: tuple[int, ...],
    layers: frozenset[int],
    most_layers: int,
    nbytes: tuple[int, ...],
) -> list[tuple[int, frozenset[int]]]:
    """Return candidate sets of resident blocks, with as many outer ones and layers as may be; by bytes, largest first.

    Args:
        nbytes: of each block, resident.
    """
    ordered = sorted(layers)
    choices = (
        frozenset([*enclosing, *outer[:num_outer], *spread(ordered, num_layers)])
        for num_outer in range(len(outer), -1, -1)
        for num_layers in range(most_layers, -1, -1)
    )
    sized = [(sum(map(nbytes.__getitem__, resident)), resident) for resident in choices]
    return sorted(sized, key=lambda choice: -choice[0])


def _holds(plan: Plan, limits: MachineLimits, most: MachineLimits) -> bool:
    """Whether a plan for the budgets ``most`` is also that for others, which are no larger and which it fits.

    Of plans with blocks on disk, or not pinned, others may be better in smaller budgets.
    """
    is_within = limits.host_bytes <= most.host_bytes and limits.pinned_bytes <= most.pinned_bytes
    if (limits.host_bytes, limits.pinned_bytes) == (most.host_bytes, most.pinned_bytes):
        return True
    is_pinned = plan.pinned_bytes == plan.host_bytes and not plan.num_blocks(Tier.DISK)
    return is_within and is_pinned and plan.host_bytes <= limits.host_bytes and plan.pinned_bytes <= limits.pinned_bytes


@dataclass(frozen=True)
class _Planner:
    blocks: tuple[Block, ...]
    layers: frozenset[int]
    settings: Settings
    num_slots: int
    partition: Partition
    on_cuda: bool

    def plan(self, limits: MachineLimits) -> Plan:
        budget = limits.device_bytes - self._gds_bytes
        resident = self._choose_resident(budget, limits)
        whole = self._choose_whole(resident, budget)
        found, most = self._plans.get((resident, whole), (None, limits))
        if found is None or not _holds(found, limits, most):
            found = self._beside(resident, whole, limits)
            self._plans[resident, whole] = found, limits
        return found

    def _beside(self, resident: frozenset[int], whole: frozenset[int], limits: MachineLimits) -> Plan:
        """Return the plan with these blocks on the device, and the others where the host's budgets have them."""
        streamed = [block for block in self.blocks if block.index not in resident]
        in_slots = self._in_slots(whole)
        host = HostPlanner(streamed, self._host_sizes, limits).choose()
        homes = tuple(self._home(block.index, resident, whole, host) for block in self.blocks)
        return Plan(
            homes=homes,
            num_slots=min(self.num_slots, len(in_slots)),
            slot_bytes=max((self._whole_bytes[index] for index in in_slots), default=0),
            num_staging=host.num_staging,
            staging_bytes=host.staging_bytes,
            device_bytes=self._device_bytes(resident, whole) + self._gds_bytes,
            host_bytes=host.host_bytes,
            pinned_bytes=host.pinned_bytes,
            streamed_bytes=sum(block.nbytes for block in streamed),
            num_ranks=self.partition.size,
        )

    @cached_property
    def _plans(self) -> dict[tuple[frozenset[int], frozenset[int]], tuple[Plan, MachineLimits]]:
        """The last plan and its budgets, by the blocks on the device and those of them that are whole."""
        return {}

    def _home(self, index: int, resident: frozenset[int], whole: frozenset[int], host: HostSide) -> Home:
        if index in resident:
            return _home(Tier.DEVICE, shared=index not in whole)
        return _home(Tier.HOST, pinned=index in host.pinned) if index in host.hosted else _home(Tier.DISK)

    def _choose_resident(self, budget: int, limits: MachineLimits) -> frozenset[int]:
        place = bisect_left(self._least_needed, -budget, key=lambda needed: -needed)
        if place == len(self._least_needed):
            raise self._too_little_device_memory(budget, self._least_needed[-1], limits)
        return self._resident_choices[place][1]

    @cached_property
    def _least_needed(self) -> list[int]:
        """The least bytes that the candidates for resident blocks need, up to each of them."""
        return list(accumulate((needed for needed, _ in self._resident_choices), min))

    def _choose_whole(self, resident: frozenset[int], budget: int) -> frozenset[int]:
        """Return the resident blocks that every rank has as a whole: besides those outside the layers, what fits."""
        if self.partition.size == 1:
            return resident
        layers = sorted(resident & self.layers)
        for num_whole in range(len(layers), 0, -1):
            whole = self._whole(resident) | {*spread(layers, num_whole)}
            if self._device_bytes(resident, whole) <= budget:
                return whole
        return self._whole(resident)

    def _whole(self, resident: frozenset[int]) -> frozenset[int]:
        """Return the resident blocks that are never divided among ranks."""
        return resident if self.partition.size == 1 else resident - self.layers

    def _too_little_device_memory(self, budget: int, needed: int, limits: MachineLimits) -> PlanError:
        """Return the error, with remedies. Names budget keys only if they were stated."""
        largest = max(self.blocks, key=lambda block: block.nbytes)
        what, remedies = "the device memory for weights", []
        if self.settings.memory.max_weight_memory == limits.device_bytes:
            what, remedies = "zinfer.max_weight_memory", ["raise it"]
        if self.num_slots > 1 and largest.nbytes <= budget:
            remedies.append("lower zinfer.num_slots" if self.settings.num_slots else "set zinfer.num_slots to 1")
        if not any(block.layout.max_dequantized_bytes for block in self.blocks):
            remedies.append('quantize the weights (zinfer.quantization {"bits": 4, "group_size": 128})')
        remedies = remedies or ["use a device with more memory"]
        return PlanError(
            f"{what} is {human_bytes(budget)}, too small to stream through {self.num_slots} slots: "
            f"the largest block, {largest.name}, takes {human_bytes(largest.nbytes)}. At least {needed} bytes "
            f"({human_bytes(needed)}) are needed; {', or '.join(remedies)}"
        )

    @cached_property
    def _resident_choices(self) -> list[tuple[int, frozenset[int]]]:
        """Candidate sets of resident blocks, largest first, each with the device memory that it takes with slots."""
        enclosing = [block.index for block in self.blocks if block.encloses]
        outer = sorted(
            set(range(len(self.blocks))) - self.layers - set(enclosing), key=lambda index: self.blocks[index].nbytes
        )
        most_layers = len(self.layers) if self.settings.offload.device in (None, "none") else 0
        divided = self.layers if self.partition.size > 1 else ()
        nbytes = (
            (self._range_bytes if index in divided else self._whole_bytes)[index] for index in range(len(self.blocks))
        )
        choices = _resident_sets(tuple(enclosing), tuple(outer), self.layers, most_layers, tuple(nbytes))
        return [(self._beside_slots(nbytes, self._whole(resident)), resident) for nbytes, resident in choices]

    def _device_bytes(self, resident: frozenset[int], whole: frozenset[int]) -> int:
        return self._beside_slots(self._bytes_of(resident, whole), whole)

    def _beside_slots(self, nbytes: int, whole: frozenset[int]) -> int:
        """Return the device memory of resident blocks of so many bytes, and of slots for those that are not whole."""
        largest = next((self._whole_bytes[index] for index in self._largest_first if index not in whole), 0)
        slots = min(self.num_slots, len(self.blocks) - len(whole)) * largest
        # Conversions end before the slots are allocated.
        return max(slots, self._converting_bytes) + nbytes

    def _bytes_of(self, resident: frozenset[int], whole: frozenset[int]) -> int:
        if whole is resident:
            return sum(map(self._whole_bytes.__getitem__, resident))
        return sum((self._whole_bytes if index in whole else self._range_bytes)[index] for index in resident)

    def _in_slots(self, whole: frozenset[int]) -> list[int]:
        """Return the blocks that pass through slots: streamed ones, and those gathered from other ranks."""
        return [block.index for block in self.blocks if block.index not in whole]

    @cached_property
    def _converting_bytes(self) -> int:
        alone = conversion_bytes(self.blocks, to_host=self.on_cuda)
        if self.partition.size == 1:
            return alone
        whole = max((self._whole_bytes[block.index] for block in self.blocks if block.conversion), default=0)
        return alone + whole + whole // self.partition.size  # the slab of one rank, and a range of it

    @cached_property
    def _whole_bytes(self) -> list[int]:
        """Device memory of each block as compute uses it."""
        return [self.partition.gathered_bytes(block.nbytes) for block in self.blocks]

    @cached_property
    def _largest_first(self) -> list[int]:
        """Indices of the blocks by `_whole_bytes`."""
        return sorted(range(len(self.blocks)), key=self._whole_bytes.__getitem__, reverse=True)

    @cached_property
    def _range_bytes(self) -> list[int]:
        """Device memory of each block, divided among ranks."""
        return [self.partition.range_bytes(block.nbytes) for block in self.blocks]

    @cached_property
    def _host_sizes(self) -> HostSizes:
        return HostSizes(self.blocks, self.settings, self.partition)

    @property
    def _gds_bytes(self) -> int:
        """Device memory for reads directly into it (GPUDirect Storage)."""
        return self._host_sizes.max_ring_bytes if self.settings.aio.use_gds and self.on_cuda else 0
