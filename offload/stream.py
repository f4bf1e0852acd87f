"""Copies to the device in parallel with compute: one interface, with CUDA streams or without.

`HostStream` implements it for the CPU: a copy is done when the call returns, so its events are always reached.
"""

import ctypes
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final, Protocol

import torch

from zinfer.nvme.aligned import align_up
from zinfer.nvme.pool import Pool

log = logging.getLogger(__name__)

_LEAST_SHARED_BYTES: Final = 4 << 20  # a millisecond of one thread: sharing less costs more than it saves
_YIELD_BYTES: Final = 256 << 20  # some 5 ms of a link; yielding costs it a few microseconds
_MOST_OPEN_WAITS: Final = 4096  # waits whose times are not read yet; each holds two CUDA events


class Event(Protocol):
    """A point in a stream's work."""

    def synchronize(self) -> None:
        """Block the calling thread until the point is reached."""

    def is_reached(self) -> bool:
        """Whether the work before the point is done."""

    def time_s(self) -> float:
        """When the point was reached, on the clock of `time.perf_counter`; only once it is."""


class CopyStream(ABC):
    """A stream of copies to the device, which compute can wait for.

    ``needs_pinned`` tells whether copies need pinned memory to run at the link's speed and asynchronously.
    """

    device: torch.device
    needs_pinned: bool

    @abstractmethod
    def after(self, event: Event) -> None:
        """Make later copies wait for ``event``."""

    @abstractmethod
    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy ``source`` into ``target``, casting when the dtypes differ; both must live until `mark`'s event."""

    @abstractmethod
    def run(self, work: Callable[[], None]) -> None:
        """Call ``work`` with this stream as the current one, so that what it enqueues runs in order with the copies."""

    @abstractmethod
    def mark(self) -> Event:
        """Return the event after the copies so far."""

    @abstractmethod
    def join(self, event: Event) -> Event:
        """Make later compute wait for ``event``; returns the event at which it continues."""

    @abstractmethod
    def mark_compute(self) -> Event:
        """Return the event after the compute so far."""

    @abstractmethod
    def compute_waited_s(self) -> float:
        """Return the seconds of device time that compute has waited in `join`; waits under way do not count."""

    @abstractmethod
    def copies_waited_s(self) -> float:
        """Return the seconds of device time that copies have waited in `after`, likewise."""


class HostEvent:
    """The event of work that is done when the call returns."""

    def __init__(self) -> None:
        self._at_s = time.perf_counter()

    def synchronize(self) -> None:
        """Return at once."""

    def is_reached(self) -> bool:
        return True

    def time_s(self) -> float:
        return self._at_s


class HostStream(CopyStream):
    """Copies synchronously in the calling thread, so all its events are reached.

    Args:
        copiers: threads that share large copies; one thread would be slower than a fast disk.
    """

    needs_pinned = False

    def __init__(self, copiers: Pool | None = None) -> None:
        self.device = torch.device("cpu")
        self._copiers = copiers

    def after(self, event: Event) -> None:
        event.synchronize()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if target.dtype == source.dtype and target.is_contiguous() and source.is_contiguous():
            # Not `copy_`: its threads would spin and compete with reads and compute.
            assert target.nbytes == source.nbytes
            self._move_bytes(target.data_ptr(), source.data_ptr(), source.nbytes)
        else:
            target.copy_(source)

    def _move_bytes(self, target: int, source: int, nbytes: int) -> None:
        if self._copiers is None or nbytes < _LEAST_SHARED_BYTES:
            ctypes.memmove(target, source, nbytes)
            return
        share = align_up(-(-nbytes // self._copiers.num_threads))
        for copied in [
            self._copiers.submit(partial(ctypes.memmove, target + begin, source + begin, min(share, nbytes - begin)))
            for begin in range(0, nbytes, share)
        ]:
            copied.result()

    def run(self, work: Callable[[], None]) -> None:
        work()

    def mark(self) -> Event:
        return HostEvent()

    def join(self, event: Event) -> Event:
        event.synchronize()
        return HostEvent()

    def mark_compute(self) -> Event:
        return HostEvent()

    def compute_waited_s(self) -> float:
        return 0.0

    def copies_waited_s(self) -> float:
        return 0.0


class CudaClock:
    """Maps CUDA events to the host's clock through one event seen by both; drifts some 10 us in a few minutes."""

    def __init__(self, device: torch.device) -> None:
        with torch.cuda.device(device):
            self.origin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self.origin.record()
        self.origin.synchronize()
        self.origin_s = time.perf_counter()


class CudaEvent:
    """A point recorded on a CUDA stream."""

    def __init__(self, clock: CudaClock) -> None:
        self.event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._clock = clock

    def synchronize(self) -> None:
        self.event.synchronize()

    def is_reached(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def time_s(self) -> float:
        return self._clock.origin_s + float(self._clock.origin.elapsed_time(self.event)) / 1e3


class _Waits:
    """Measures how long a CUDA stream waits for events of another."""

    def __init__(self, clock: CudaClock) -> None:
        self._clock = clock
        # `sum_s` may be called from another thread.
        self._lock = threading.Lock()
        self._open: list[tuple[CudaEvent, CudaEvent]] = []
        self._waited_s = 0.0

    def wait(self, stream: torch.cuda.Stream, event: Event) -> CudaEvent:
        """Make the stream's later work wait for the event; returns the event at which it continues."""
        assert isinstance(event, CudaEvent)
        before, behind = CudaEvent(self._clock), CudaEvent(self._clock)
        before.event.record(stream)
        stream.wait_event(event.event)
        behind.event.record(stream)
        with self._lock:
            self._open.append((before, behind))
            if len(self._open) > _MOST_OPEN_WAITS:
                self._collect()
        return behind

    def sum_s(self) -> float:
        with self._lock:
            self._collect()
            return self._waited_s

    def _collect(self) -> None:
        still_open: list[tuple[CudaEvent, CudaEvent]] = []
        for before, behind in self._open:
            if behind.is_reached():
                self._waited_s += before.event.elapsed_time(behind.event) / 1e3
            else:
                still_open.append((before, behind))
        self._open = still_open


class CudaStream(CopyStream):
    """Copies on a CUDA stream of its own; the compute stream is the current stream of the thread that calls `join`.

    The device's copy engine keeps serving the same stream while it has work: a small copy of another stream would wait
    behind all queued slabs, and compute with it. So now and then the copies wait for an event of an idle stream; it is
    reached at once, and the engine takes other copies in between.
    """

    needs_pinned = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._clock = CudaClock(device)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._idle_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._bytes_since_yield = 0  # not locked between lanes: a wrong sum is harmless
        self._copy_waits = _Waits(self._clock)
        self._compute_waits = _Waits(self._clock)

    def after(self, event: Event) -> None:
        self._copy_waits.wait(self._stream, event)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            if source.dtype == target.dtype:
                for target_piece, source_piece in zip(_pieces(target), _pieces(source), strict=True):
                    target_piece.copy_(source_piece, non_blocking=True)
                    self._yield_after(source_piece.nbytes)
                return
            # The cast runs on the device: raw bytes cross the link, into memory that belongs to the copy stream.
            raw = torch.empty_like(source, device=self.device)
            raw.copy_(source, non_blocking=True)
            target.copy_(raw)

    def run(self, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self._stream):
            work()

    def mark(self) -> Event:
        return self._record(self._stream)

    def join(self, event: Event) -> Event:
        return self._compute_waits.wait(torch.cuda.current_stream(self.device), event)

    def mark_compute(self) -> Event:
        return self._record(torch.cuda.current_stream(self.device))

    def compute_waited_s(self) -> float:
        return self._compute_waits.sum_s()

    def copies_waited_s(self) -> float:
        return self._copy_waits.sum_s()

    def _yield_after(self, nbytes: int) -> None:
        """Let the copy engine serve other streams after every ``_YIELD_BYTES``."""
        self._bytes_since_yield += nbytes
        if self._bytes_since_yield >= _YIELD_BYTES:
            self._bytes_since_yield = 0
            self._idle_stream.wait_stream(self._stream)
            self._stream.wait_stream(self._idle_stream)

    def _record(self, stream: torch.cuda.Stream) -> CudaEvent:
        event = CudaEvent(self._clock)
        event.event.record(stream)
        return event


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Split the tensor along its first dimension into parts of at most ``_YIELD_BYTES``, or single rows."""
    if tensor.nbytes <= _YIELD_BYTES or tensor.dim() == 0:
        yield tensor
        return
    rows = max(1, _YIELD_BYTES * len(tensor) // tensor.nbytes)
    yield from torch.split(tensor, rows)


def drain(stream: CopyStream) -> None:
    """Wait for copies and compute during the handling of an error; a device error is only logged."""
    try:
        stream.mark().synchronize()
        stream.mark_compute().synchronize()
    except RuntimeError as error:
        log.warning("the device failed while its copies were waited for: %s", error)


def open_stream(device: torch.device) -> CopyStream:
    """Open a copy stream for a device: ``cuda`` or ``cpu``."""
    return CudaStream(device) if device.type == "cuda" else HostStream()
