"""The parts of the device's memory, and what a cap on all of them (`zinfer.max_device_memory`) must at least be."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import ceil

from zinfer.errors import PlanError
from zinfer.planning.memory import Footprint, reserved_bytes
from zinfer.planning.placement import Plan
from zinfer.probe.limits import MachineLimits
from zinfer.units import human_bytes


@dataclass(frozen=True)
class DeviceParts:
    """Bytes of all device memory, by what takes them.

    Attributes:
        weights: resident blocks, and buffers for reads directly into the device.
        slots: of blocks that stream, or what converting blocks takes while they are loaded, if that is more.
        kv_cache: pages, or their slots if they are in host memory.
        activations: of the largest pass, with logits and sampling; or what is left for passes of unknown size.
        reserve: for loaded kernels, captured graphs, workspaces and the allocator.
    """

    weights: int
    slots: int
    kv_cache: int
    activations: int
    reserve: int

    @classmethod
    def of(
        cls, plan: Plan, footprint: Footprint | None, limits: MachineLimits, device_memory_bytes: int
    ) -> "DeviceParts":
        """Divide the device memory of a plan.

        Args:
            footprint: beside the weights; None: passes take what the weights leave.
            device_memory_bytes: free for everything, within the cap.
        """
        slots = plan.num_slots * plan.slot_bytes
        reserve = reserved_bytes(device_memory_bytes, on_cuda=limits.on_cuda)
        if footprint is None:
            footprint = Footprint(0, max(device_memory_bytes - plan.device_bytes - reserve, 0), 0)
        return cls(plan.device_bytes - slots, slots, footprint.kv_bytes, footprint.activation_bytes, reserve)

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(vars(self).values())

    def __str__(self) -> str:
        return ", ".join(f"{name.replace('kv_', 'KV ')} {human_bytes(nbytes)}" for name, nbytes in vars(self).items())


@contextmanager
def naming_least_cap(
    limits: MachineLimits, free_bytes: int, parts_within: Callable[[MachineLimits], DeviceParts]
) -> Iterator[None]:
    """Let a PlanError of the block say what the least cap is that would do, if there is a cap and raising it helps.

    Args:
        limits: with the cap, if there is one.
        free_bytes: free device memory, whatever the cap.
        parts_within: plans the same within other limits, and raises PlanError where that fails.
    """
    try:
        yield
    except PlanError as error:
        cap = limits.cap_bytes
        least = None if cap is None else _least_cap(limits, cap, free_bytes, parts_within)
        if cap is None or least is None:
            raise
        num, (all_bytes, parts) = limits.num_devices, least
        nbytes, together = ceil(all_bytes / num), "" if num == 1 else f" of {num:.3g} devices together"
        raise PlanError(
            f"zinfer.max_device_memory is {human_bytes(round(cap / num))}, too little: at least {nbytes} bytes "
            f"({human_bytes(nbytes)}) are needed, for {parts}{together}; {error}"
        ) from error


def _least_cap(
    limits: MachineLimits, cap_bytes: int, free_bytes: int, parts_within: Callable[[MachineLimits], DeviceParts]
) -> tuple[int, DeviceParts] | None:
    """Return the least cap that holds a plan, with its parts; None if not even all free memory does."""

    def parts_at(nbytes: int) -> DeviceParts | None:
        try:
            return parts_within(replace(limits, cap_bytes=nbytes))
        except PlanError:
            return None

    low, high = cap_bytes, max(cap_bytes, 1)
    found = None
    while found is None:
        if high >= free_bytes:
            return None
        low, high = high, min(2 * high, free_bytes)
        found = parts_at(high)
    while high - low > 1:
        middle = (low + high) // 2
        if (parts := parts_at(middle)) is None:
            low = middle
        else:
            high, found = middle, parts
    return high, found
