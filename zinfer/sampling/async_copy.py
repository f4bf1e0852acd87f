"""Small things on their way between host and device, neither of which waits for the other."""

import functools
from collections.abc import Sequence

import torch


def send(numbers: Sequence[int] | Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Numbers as a tensor on the device: from pinned memory, since the host waits for the device else."""
    return on_its_way(torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda"), device)


def on_its_way(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on the device of a tensor in pinned memory, there for all that is launched from now on.

    It may have to wait behind a slab that is on its way. Where the host is ahead of the device it does so beside what
    the device still computes, because it goes by a stream of its own.
    """
    if device.type != "cuda":
        return host.to(device)
    compute = torch.cuda.current_stream(device)
    own = _stream(compute.device)
    with torch.cuda.stream(own):
        copy = host.to(device, non_blocking=True)
    compute.wait_stream(own)
    copy.record_stream(compute)
    return copy


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    # torch hands out a few streams of each priority in turn: slabs have theirs of the usual one.
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]


class DeviceToHostCopy:
    """Copies of device tensors, ready once the work before them is done; what comes after is not waited for."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._event: torch.cuda.Event | None = None
        self._copies = list(tensors)
        if any(tensor.is_cuda for tensor in tensors):
            self._copies = [torch.empty_like(tensor, device="cpu", pin_memory=True) for tensor in tensors]
            for copy, tensor in zip(self._copies, tensors, strict=True):
                copy.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def take(self) -> list[torch.Tensor]:
        """The copies; blocks until they are there."""
        if self._event is not None:
            self._event.synchronize()
        return self._copies
