"""`get_accelerator`: DeepSpeed's interface to the device that models compute on, over torch's."""

from typing import Any, Final

import psutil
import torch

from zinfer.units import human_bytes

_SAME: Final = {
    "memory_cached": "memory_reserved",
    "max_memory_cached": "max_memory_reserved",
    "reset_max_memory_cached": "reset_peak_memory_stats",
    "reset_max_memory_allocated": "reset_peak_memory_stats",
}
_NOTHING_ON_CPU: Final = ("empty_cache", "reset_peak_memory_stats")
_IN_USE: Final = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")


class Accelerator:
    """CUDA where torch has it, else the CPU.

    Other functions, such as `synchronize`, are those of `torch.cuda` or `torch.cpu`. On the CPU the memory in use is
    the process's resident set, and the total the machine's.
    """

    def __init__(self) -> None:
        self._name = "cuda" if torch.cuda.is_available() else "cpu"
        self._torch: Any = torch.cuda if self.is_cuda else torch.cpu

    @property
    def is_cuda(self) -> bool:
        """Whether the device is a GPU."""
        return self._name == "cuda"

    def __getattr__(self, name: str) -> Any:
        own = _SAME.get(name, name)
        if not self.is_cuda and own in _IN_USE:
            return _resident_bytes
        if not self.is_cuda and own in _NOTHING_ON_CPU:
            return _nothing
        found = getattr(self._torch, own, None)
        if found is None:
            raise AttributeError(f"get_accelerator() has no {name!r} here; use the functions of torch.{self._name}")
        return found

    def device_name(self, device_index: int | None = None) -> str:
        """Return "cuda", "cuda:N" or "cpu", for `torch.device`."""
        return self._name if device_index is None or not self.is_cuda else f"{self._name}:{device_index}"

    def current_device_name(self) -> str:
        """Return the name of the device in use."""
        return self.device_name(torch.cuda.current_device() if self.is_cuda else None)

    def communication_backend_name(self) -> str:
        """Return "nccl" or "gloo", for `init_distributed`."""
        return "nccl" if self.is_cuda else "gloo"

    def manual_seed(self, seed: int) -> None:
        """Seed the device's generator."""
        (torch.cuda if self.is_cuda else torch).manual_seed(seed)

    manual_seed_all = manual_seed

    def total_memory(self, device_index: int | None = None) -> int:
        """Return the device's memory in bytes."""
        if self.is_cuda:
            return int(torch.cuda.get_device_properties(self._index(device_index)).total_memory)
        return int(psutil.virtual_memory().total)

    def available_memory(self, device_index: int | None = None) -> int:
        """Return the free memory in bytes."""
        if self.is_cuda:
            return int(torch.cuda.mem_get_info(self._index(device_index))[0])
        return int(psutil.virtual_memory().available)

    def is_bf16_supported(self) -> bool:
        """Whether the device computes in bfloat16."""
        return not self.is_cuda or torch.cuda.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        """Whether the device computes in float16."""
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        """Return the dtypes that engines compute in here."""
        return [torch.float32, torch.float16] + [torch.bfloat16] * self.is_bf16_supported()

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        """Return a page-locked copy of a host tensor; the tensor itself without a GPU."""
        return tensor.pin_memory() if self.is_cuda else tensor

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on the device."""
        return tensor.device.type == self._name

    @staticmethod
    def _index(device_index: int | None) -> int:
        return torch.cuda.current_device() if device_index is None else device_index


_ACCELERATOR: Final = Accelerator()


def get_accelerator() -> Accelerator:
    """Return the device's interface, always the same object."""
    return _ACCELERATOR


def see_memory_usage(message: str, force: bool = False) -> None:
    """Print a message with the memory in use, if ``force`` is set, as DeepSpeed's does."""
    if not force:
        return
    device, machine = get_accelerator(), psutil.virtual_memory()
    own = human_bytes(device.memory_allocated())
    if device.is_cuda:
        own += f" on the GPU, {human_bytes(device.max_memory_allocated())} at most"
    host = f"{human_bytes(machine.used)} of {human_bytes(machine.total)}, {machine.percent:.0f} %"
    print(f"{message}: this process {own}; host memory {host}", flush=True)


def _resident_bytes(device_index: object = None) -> int:
    return int(psutil.Process().memory_info().rss)


def _nothing(device_index: object = None) -> None:
    """Do nothing: the CPU's allocator has no cache and records no peak."""
