"""Memory that the GPUs of one host map from each other, and the barriers between them.

[Note: a lost rank] A barrier is a kernel that spins until every rank has written to its signal pad, which a lost rank
never does. `give_up` writes in its place, so that the device comes to its end; the ranges of the lost rank are then not
in the slabs, and nothing computed from them may be used. It writes by operations of a stream: a kernel that was never
launched before may have to be loaded first, for which CUDA waits until the device is idle.
"""

import os
import threading
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as symmetric

from zinfer.nvme.pool import end_process, start_thread
from zinfer.offload.partition import Partition

_REPEAT_S: Final = 1e-3
_CLOSE_S: Final = 20.0
NUM_BARRIERS: Final = 3
"""Channels of every memory that `SharedMemory.barrier` may use; kernels that wait by themselves take those after."""


class Card(NamedTuple):
    """A rank's GPU: its host, its number among those that the process sees, and what tells it from all others."""

    host: str
    number: int
    uuid: str

    @classmethod
    def of(cls, host: str, device: torch.device) -> "Card":
        number = torch.cuda.current_device() if device.index is None else device.index
        return cls(host, number, str(torch.cuda.get_device_properties(number).uuid))

    def reads(self, other: "Card") -> bool:
        """Whether this process can map memory of another rank's GPU.

        Ranks that see one GPU each, all under number 0, cannot; ranks that share a GPU can if torch is told so.
        """
        if self.host != other.host or (self.number == other.number) != (self.uuid == other.uuid):
            return False
        if self.number == other.number:
            return os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") == "1"
        return torch.cuda.can_device_access_peer(self.number, other.number)


def can_copy(rank: int, cards: Sequence[Card]) -> bool:
    """Whether a rank can map memory of all others, by their GPUs."""
    return all(cards[rank].reads(card) for other, card in enumerate(cards) if other != rank)


class SharedMemory:
    """Memory of the same size on every rank, which all of them map.

    Args:
        own: this rank's (uint8).
        handle: of torch's symmetric memory.
        partition: this rank's place.
        num_channels: of its signal pads that are used; 0: nobody waits for another.

    Attributes:
        addresses, pads: of every rank's memory and signal pad, for kernels (int64, [ranks]).
    """

    def __init__(self, own: torch.Tensor, handle: Any, partition: Partition, num_channels: int) -> None:
        self.own = own
        self._handle = handle
        rank, size = partition.rank, partition.size
        self._views = [handle.get_remote_tensor(peer, own.shape, own.dtype) for peer in range(size)]
        peers = range(size) if num_channels else ()
        pads = [handle.get_signal_pad(peer, (num_channels * size,), torch.uint32) for peer in peers]
        self.addresses = torch.tensor([view.data_ptr() for view in self._views], device=own.device)
        self.pads = torch.tensor([pad.data_ptr() for pad in pads], device=own.device)
        # A barrier waits for 1 in each other rank's place of the own pad, and for 0 in the own place of theirs.
        self._awaited = [
            (pad, channel * size + place, value)
            for channel in range(num_channels)
            for peer in range(size)
            if peer != rank
            for pad, place, value in ((pads[rank], peer, 1), (pads[peer], rank, 0))
        ]

    def of(self, rank: int) -> torch.Tensor:
        """A rank's memory."""
        return self._views[rank]  # type: ignore[no-any-return]

    def barrier(self, channel: int) -> None:
        """Make the current stream wait until those of all ranks are here; barriers in a row have other channels."""
        assert channel < NUM_BARRIERS
        self._handle.barrier(channel=channel)

    def signal_for_all(self) -> None:
        """Write what the other ranks would, on the current stream."""
        for pad, place, value in self._awaited:
            self._handle.stream_write_value32(pad, place, value)


class PeerMemory:
    """All the memory that the ranks of a group share; made, and asked for memory, on all of them in the same order.

    Args:
        partition: this rank's place.
        device: a CUDA device.
        group: the ranks, over any backend; only its store is used.
    """

    def __init__(self, partition: Partition, device: torch.device, group: "dist.ProcessGroup") -> None:
        self.partition, self.device = partition, device
        self._group = group
        self._shared: list[SharedMemory] = []
        self._over = threading.Event()
        self._giving_up: threading.Thread | None = None
        # Of another priority than those that wait for a barrier, so that the device does not queue it behind them.
        self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    def share(self, nbytes: int, num_channels: int = NUM_BARRIERS) -> SharedMemory:
        """Allocate memory on every rank, with that many channels for those who wait for each other."""
        own = symmetric.empty(nbytes, dtype=torch.uint8, device=self.device)
        handle = symmetric.rendezvous(own, self._group)
        self._shared.append(SharedMemory(own, handle, self.partition, num_channels))
        return self._shared[-1]

    def give_up(self) -> None:
        """Let all barriers pass from now on, until `close`; may be called again, by any thread."""
        if self._giving_up is None:
            self._giving_up = start_thread("zinfer-give-up", self._pass_barriers, self._end_late)

    def close(self) -> None:
        """Free the memory; the device is done with it."""
        self._over.set()
        if self._giving_up is not None:
            self._giving_up.join()
        self._shared.clear()

    def _pass_barriers(self) -> None:
        torch.cuda.set_device(self.device)
        with torch.cuda.stream(self._stream):
            while not self._over.wait(_REPEAT_S):
                for shared in [*self._shared]:
                    shared.signal_for_all()
                self._stream.synchronize()

    def _end_late(self, failure: BaseException) -> None:
        """End the process unless it frees the memory soon: a device that waits for a lost rank never comes to its end.

        One that has failed itself does: whoever waits for it gets its error, and has more to say.
        """
        if not self._over.wait(_CLOSE_S):
            end_process(failure)
