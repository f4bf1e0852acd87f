"""Copies towards the device beside the compute: one interface, with CUDA streams and events or without.

`HostStream` is the same machinery where device memory is host memory: a copy is done when the call returns, so its
events hold nothing back.
"""

import threading
from abc import ABC, abstractmethod
from typing import Final, Protocol

import torch

_MOST_OPEN_WAITS: Final = 4096  # waits whose times are not read yet; each holds two CUDA events


class Event(Protocol):
    """A point in a stream's work."""

    def synchronize(self) -> None:
        """Block the calling thread until the point is reached."""


class CopyStream(ABC):
    """Where slabs are copied to the device and compute waits for them.

    ``needs_pinned`` tells whether only pinned memory copies at the link's speed and beside the compute.
    """

    device: torch.device
    needs_pinned: bool

    @abstractmethod
    def after(self, event: Event) -> None:
        """Let the copies that follow wait for ``event``."""

    @abstractmethod
    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy ``source`` into ``target``, casting when the dtypes differ; both must live until `mark`'s event."""

    @abstractmethod
    def mark(self) -> Event:
        """The point after the copies so far."""

    @abstractmethod
    def join(self, event: Event) -> None:
        """Let the compute that follows wait for ``event``."""

    @abstractmethod
    def mark_compute(self) -> Event:
        """The point after the compute so far."""

    @abstractmethod
    def stall_s(self) -> float:
        """Seconds of device time that compute has waited in `join`, as far as the waits are over."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Device memory (uint8) for copies to fill.

        torch may hand out memory that compute, enqueued before, still uses: the copies wait for that.
        """
        memory = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        self.after(self.mark_compute())
        return memory


class _Reached:
    """The event of work that is done when the call returns."""

    def synchronize(self) -> None:
        """Return at once."""


_REACHED = _Reached()


class HostStream(CopyStream):
    """Copies by the calling thread; ``join`` has nothing to wait for because the caller has waited for the thread."""

    needs_pinned = False

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def after(self, event: Event) -> None:
        event.synchronize()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def mark(self) -> Event:
        return _REACHED

    def join(self, event: Event) -> None:
        event.synchronize()

    def mark_compute(self) -> Event:
        return _REACHED

    def stall_s(self) -> float:
        return 0.0


class CudaStream(CopyStream):
    """Copies on a stream of their own; compute is whatever stream is current in the thread that calls `join`."""

    needs_pinned = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # Another thread may ask for the stalls while this one runs.
        self._lock = threading.Lock()
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._spare: list[torch.cuda.Event] = []
        self._stall_s = 0.0

    def after(self, event: Event) -> None:
        assert isinstance(event, torch.cuda.Event)
        self._stream.wait_event(event)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            if source.dtype == target.dtype:
                target.copy_(source, non_blocking=True)
                return
            # The cast runs on the device: raw bytes cross the link, into memory that belongs to the copy stream.
            raw = torch.empty_like(source, device=self.device)
            raw.copy_(source, non_blocking=True)
            target.copy_(raw)

    def mark(self) -> Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def join(self, event: Event) -> None:
        assert isinstance(event, torch.cuda.Event)
        compute = torch.cuda.current_stream(self.device)
        with self._lock:
            before, behind = self._timer(), self._timer()
            before.record(compute)
            compute.wait_event(event)
            behind.record(compute)
            self._waits.append((before, behind))
            if len(self._waits) > _MOST_OPEN_WAITS:
                self._collect()

    def mark_compute(self) -> Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def stall_s(self) -> float:
        with self._lock:
            self._collect()
            return self._stall_s

    def _timer(self) -> torch.cuda.Event:
        return self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def _collect(self) -> None:
        """Sum the waits that are over and keep their events for the next ones."""
        open_waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        for before, behind in self._waits:
            if behind.query():  # type: ignore[no-untyped-call]
                self._stall_s += before.elapsed_time(behind) / 1e3
                self._spare += [before, behind]
            else:
                open_waits.append((before, behind))
        self._waits = open_waits


def open_stream(device: torch.device) -> CopyStream:
    """The copy stream for a device: ``cuda`` or ``cpu``."""
    return CudaStream(device) if device.type == "cuda" else HostStream()
