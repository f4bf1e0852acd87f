"""What this machine lends a run: the device, and the memory budgets where the configuration states none."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import psutil
import torch

from zinfer.config import Memory, Settings
from zinfer.errors import ConfigError

# Shares of what is free that weights may take; the rest is for activations, the KV cache and the host's own needs.
_DEVICE_SHARE: Final = 0.8
HOST_SHARE: Final = 0.8
_CPU_SHARE: Final = 0.4  # on a CPU run device and host memory are the same memory
_CGROUP: Final = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class MachineLimits:
    """Budgets in bytes. ``device_bytes`` holds slots and resident slabs; ``host_bytes`` host slabs and staging slots,
    of which ``pinned_bytes`` may be pinned; ``host_kv_bytes`` are taken of both already, for keys and values."""

    device: torch.device
    device_bytes: int
    host_bytes: int
    pinned_bytes: int
    host_kv_bytes: int = 0

    @property
    def on_cuda(self) -> bool:
        """Whether there is memory to pin and a link to cross."""
        return self.device.type == "cuda"

    def stated(self, memory: Memory) -> "MachineLimits":
        """The same with the budgets that the configuration states; host memory may be pinned unless it says less."""
        host_bytes = self.host_bytes if memory.max_host_memory is None else memory.max_host_memory
        return replace(
            self,
            device_bytes=self.device_bytes if memory.max_device_memory is None else memory.max_device_memory,
            host_bytes=host_bytes,
            pinned_bytes=host_bytes if memory.max_pinned_memory is None else memory.max_pinned_memory,
        )


def choose_device(settings: Settings) -> torch.device:
    """The device that the configuration asks for; ``auto`` takes CUDA where there is one.

    Raises:
        ConfigError: CUDA is asked for and torch sees no device.
    """
    available = torch.cuda.is_available()
    if settings.device == "cuda" and not available:
        raise ConfigError('zinfer.device is "cuda", but torch sees no CUDA device; set it to "auto" or "cpu"')
    if settings.device == "cpu" or not available:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def find_limits(settings: Settings) -> MachineLimits:
    """The stated budgets, and shares of what is free now for those that are not stated."""
    device = choose_device(settings)
    free_host = free_host_bytes()
    if device.type == "cuda":
        device_bytes, host_bytes = int(_free_on(device) * _DEVICE_SHARE), int(free_host * HOST_SHARE)
    else:
        device_bytes = host_bytes = int(free_host * _CPU_SHARE)
    return MachineLimits(device, device_bytes, host_bytes, host_bytes).stated(settings.memory)


def free_host_bytes() -> int:
    """Host memory that a process may take now."""
    return min(int(psutil.virtual_memory().available), _free_in_cgroup())


def free_device_bytes(limits: MachineLimits) -> int:
    """Device memory that is free for everything; on a CPU, where both are one memory, what the host's budget leaves."""
    if limits.on_cuda:
        return _free_on(limits.device)
    return max(0, free_host_bytes() - limits.host_bytes)


def _free_on(device: torch.device) -> int:
    torch.cuda.empty_cache()  # what torch keeps for later is free too
    return int(torch.cuda.mem_get_info(device)[0])


def cgroup_limit() -> int | None:
    """Bytes that a container may use (cgroup v2, "memory.max"); None where there is no limit."""
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
    except FileNotFoundError:  # not in a container, or cgroup v1
        return None
    return None if limit == "max" else int(limit)


def _free_in_cgroup() -> int:
    """Bytes that a container's limit leaves; what is free on the machine does not show it."""
    limit = cgroup_limit()
    return sys.maxsize if limit is None else max(0, limit - int((_CGROUP / "memory.current").read_text()))
