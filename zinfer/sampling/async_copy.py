"""Small asynchronous copies between host and device."""

import functools
import threading
from collections import deque
from collections.abc import Sequence

import torch

from zinfer.kernels.read_pinned import read_pinned


def send(numbers: Sequence[int] | Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Copy numbers to a tensor on the device, asynchronously from pinned memory."""
    return send_pinned(torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda"), device)


def send_pinned(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor of 4 or 8 bytes a number from pinned memory to the device, before everything launched from now on.

    The copy uses a stream of its own, so that it overlaps earlier compute, and no slab on the link holds it up.
    """
    if device.type != "cuda":
        return host.to(device)
    compute = torch.cuda.current_stream(device)
    return _sender(compute.device).send(host, compute)


class _Sender:
    """Sends to one GPU; keeps what is read until then, for torch would give its memory to the next tensor."""

    def __init__(self, device: torch.device) -> None:
        # torch reuses a few streams of each priority in turn; slabs use streams of the default priority.
        self.stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._device = device
        self._read = deque[tuple[torch.cuda.Event, torch.Tensor]]()
        self._lock = threading.Lock()

    def send(self, host: torch.Tensor, compute: torch.cuda.Stream) -> torch.Tensor:
        with torch.cuda.stream(self.stream):
            copy = read_pinned(host, self._device)
            read = self.stream.record_event()
        compute.wait_event(read)
        copy.record_stream(compute)
        with self._lock:
            self._read.append((read, host))
            while self._read and self._read[0][0].query():  # type: ignore[no-untyped-call]
                self._read.popleft()
        return copy


@functools.cache
def _sender(device: torch.device) -> _Sender:
    return _Sender(device)


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
