"""Small asynchronous copies between host and device."""

import functools
from collections.abc import Sequence

import torch


def send(numbers: Sequence[int] | Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Copy numbers to a tensor on the device, asynchronously from pinned memory."""
    return send_pinned(torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda"), device)


def send_pinned(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor in pinned memory to the device, before everything launched from now on.

    The copy uses a stream of its own, so that it overlaps earlier compute, even if it waits behind a slab on the link.
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
    # torch reuses a few streams of each priority in turn; slabs use streams of the default priority.
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]


class DeviceToHostCopy:
    """Copies of device tensors to pinned memory, ready once the work launched before them is done."""

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
        """Wait for the copies and return them."""
        if self._event is not None:
            self._event.synchronize()
        return self._copies
