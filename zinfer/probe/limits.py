"""The device of a run, and its memory budgets: stated in the configuration, or shares of free memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from zinfer.config import Memory, Settings
from zinfer.errors import ConfigError
from zinfer.probe.cgroups import free_group_bytes, free_host_bytes, memory_limit
from zinfer.units import human_bytes

if TYPE_CHECKING:  # presets are planned without torch
    import torch

# Shares of free memory for weights; the rest is for activations, the KV cache and other uses of the host.
_DEVICE_SHARE: Final = 0.8
_HOST_SHARE: Final = 0.8
_MOST_HOST_SHARE: Final = 0.95
_ENOUGH_HOST_REST: Final = 16 << 30  # 4 GiB for preempted sequences, the others for processes that compile kernels
_CPU_SHARE: Final = 0.4  # on a CPU, device and host share one memory


@dataclass(frozen=True)
class MachineLimits:
    """Budgets in bytes. ``device_bytes`` is for slots and resident slabs; ``host_bytes`` for host slabs and staging
    slots, of which ``pinned_bytes`` may be pinned. Both exclude ``host_kv_bytes``, the KV cache in host memory;
    ``host_bytes`` also ``swap_bytes``, for that of preempted sequences.
    ``cap_bytes`` is the most device memory for everything; None: all that is free."""

    device: torch.device
    device_bytes: int
    host_bytes: int
    pinned_bytes: int
    host_kv_bytes: int = 0
    num_sharing: int = 1
    """Processes of this host that share its memory, each with these budgets."""
    cap_bytes: int | None = None
    swap_bytes: int | None = None
    num_devices: float = 1
    """That count as one, with the memory of all; a stated cap is of each."""

    @property
    def on_cuda(self) -> bool:
        """Whether the device is a CUDA device, with pinned memory and a link."""
        return self.device.type == "cuda"

    def within_cap(self, nbytes: int) -> int:
        """Return so many bytes of free device memory, or the cap if that is less."""
        return nbytes if self.cap_bytes is None else min(nbytes, self.cap_bytes)

    def least(self, others: Iterable[MachineLimits]) -> MachineLimits:
        """Return the smallest budgets of several machines or processes, on this one's device."""
        several = [self, *others]
        return replace(
            self,
            device_bytes=min(each.device_bytes for each in several),
            host_bytes=min(each.host_bytes for each in several),
            pinned_bytes=min(each.pinned_bytes for each in several),
        )

    def stated(self, memory: Memory, free_device_bytes: int, free_host_bytes: int) -> MachineLimits:
        """Apply the budgets of the configuration: each is a maximum, and so is what there is.

        All host memory may be pinned unless less is stated.

        Args:
            memory: the budgets.
            free_device_bytes, free_host_bytes: what there is for them.
        """
        host_bytes = _within(memory.max_host_memory, free_host_bytes, self.host_bytes)
        return replace(
            self,
            device_bytes=_within(memory.max_weight_memory, free_device_bytes, self.device_bytes),
            host_bytes=host_bytes,
            pinned_bytes=_within(memory.max_pinned_memory, host_bytes, host_bytes),
            cap_bytes=memory.max_device_memory,
        )

    def overstated(self, memory: Memory, free_device_bytes: int) -> Iterator[str]:
        """Yield a line for each budget of the configuration that is above what there is for it.

        Args:
            memory: the budgets, which were applied to these limits.
            free_device_bytes: free device memory, whatever the cap.
        """
        num = self.num_sharing
        there_are = {
            "max_device_memory": free_device_bytes,
            "max_weight_memory": self.device_bytes,
            "max_host_memory": self.host_bytes * num,
            "max_pinned_memory": self.pinned_bytes * num,
        }
        for key, nbytes in there_are.items():
            stated_bytes = getattr(memory, key)
            if stated_bytes is not None and stated_bytes - nbytes >= num:  # less is lost where processes divide it
                yield (
                    f"zinfer.{key} is {human_bytes(stated_bytes)}, more than the {human_bytes(nbytes)} that there are "
                    "for it: these are planned with"
                )


def _within(stated_bytes: int | None, free_bytes: int, usual_bytes: int) -> int:
    """Return a stated maximum as far as there is so much, or the usual budget without one."""
    return usual_bytes if stated_bytes is None else min(stated_bytes, free_bytes)


def choose_device(settings: Settings) -> torch.device:
    """Return the configured device; ``auto`` is CUDA if available.

    Raises:
        ConfigError: CUDA is configured, but torch sees no device.
    """
    import torch

    available = torch.cuda.is_available()
    if settings.device == "cuda" and not available:
        raise ConfigError('zinfer.device is "cuda", but torch sees no CUDA device; set it to "auto" or "cpu"')
    if settings.device == "cpu" or not available:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def find_limits(settings: Settings, num_sharing: int = 1) -> MachineLimits:
    """Return the stated budgets, at most what can be had; the others are shares of what is free now.

    On a CPU, whose memory holds both, that is for the host what the weights on the device leave of the usual shares.

    Args:
        num_sharing: processes on this host that divide its memory. Budgets of host memory, stated ones too, are for all
            of them; those of device memory are for each, except unstated ones on a CPU.
    """
    device, memory, free_host = choose_device(settings), settings.memory, free_host_bytes()
    if device.type == "cuda":
        most_device, most_host = _free_on(device), obtainable_host_bytes()
        device_bytes, host_bytes = int(most_device * _DEVICE_SHARE), usual_host_bytes(free_host)
    else:
        host_bytes = int(free_host * _CPU_SHARE)
        device_bytes, most_device = host_bytes // num_sharing, free_host // num_sharing
        weight_bytes = num_sharing * (memory.max_weight_memory or device_bytes)
        beside_weights = usual_host_bytes(obtainable_host_bytes()) - weight_bytes
        most_host = max(host_bytes, beside_weights)
    limits = MachineLimits(device, device_bytes, host_bytes, host_bytes, num_sharing=num_sharing)
    limits = limits.stated(memory, most_device, most_host)
    return replace(limits, host_bytes=limits.host_bytes // num_sharing, pinned_bytes=limits.pinned_bytes // num_sharing)


def usual_host_bytes(free_bytes: int) -> int:
    """Return the budget of host memory where none is stated: a share of what is free, of much memory a larger share."""
    return int(max(free_bytes * _HOST_SHARE, min(free_bytes - _ENOUGH_HOST_REST, free_bytes * _MOST_HOST_SHARE)))


def obtainable_host_bytes() -> int:
    """Return the host memory that a process can get if it is told to.

    A virtual machine may show its memory only as it is used, so a container's limit counts more than what is free.
    """
    return free_host_bytes() if memory_limit() is None else free_group_bytes()


def free_device_bytes(limits: MachineLimits) -> int:
    """Return the free device memory, whatever the cap; on a CPU, the free memory less the host's budget."""
    if limits.on_cuda:
        return _free_on(limits.device)
    return max(0, free_host_bytes() // limits.num_sharing - limits.host_bytes)


def allocatable_bytes(device: torch.device) -> int:
    """Return the memory of a CUDA device that this process may take now: what is free, within the allocator's bound."""
    import torch

    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    bound_bytes = int(torch.cuda.get_per_process_memory_fraction(device) * total_bytes)
    return max(0, min(free_bytes, bound_bytes - torch.cuda.memory_reserved(device)))


def _free_on(device: torch.device) -> int:
    import torch

    torch.cuda.empty_cache()  # memory cached by torch counts as free
    return int(torch.cuda.mem_get_info(device)[0])
