"""Gathers slabs on the GPUs of one host: each rank copies the others' ranges out of their memory.

[Note: copy engines] A collective of NCCL occupies multiprocessors and takes 8 % from the products beside it; copies
between GPUs run on copy engines, and only the barriers around them are kernels, of one block each. Slots therefore lie
in symmetric memory, which every rank maps. Other slabs pass through a small buffer there.

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

from zinfer.offload.partition import Partition

_BUFFER_BYTES: Final = 32 << 20  # some 100 us of NVLink: the two barriers around it cost a tenth
_REPEAT_S: Final = 1e-3
_BEFORE: Final = 0  # channels of a signal pad: of the barrier before the copies, and of that after them
_AFTER: Final = 1


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


class PeerCopies:
    """Exchanges slabs among GPUs that can read each other's memory; made on all ranks in the same order.

    Args:
        partition: this rank's place.
        device: a CUDA device.
        group: the ranks, over any backend; only its store is used.
    """

    def __init__(self, partition: Partition, device: torch.device, group: "dist.ProcessGroup") -> None:
        self._partition, self._device, self._group = partition, device, group
        self._shared: dict[int, _SharedMemory] = {}  # by address
        self._over = threading.Event()
        self._giving_up: threading.Thread | None = None
        # Of another priority than those that wait for a barrier, so that the device does not queue it behind them.
        self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._buffer = self._share(_BUFFER_BYTES // partition.size * partition.size)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return memory whose slabs `gather` fills without the detour (uint8); all ranks ask for the same."""
        return self._share(nbytes).own

    def gather(self, slab: torch.Tensor) -> None:
        """As `Ranks.gather`: enqueued on the current stream."""
        shared = self._shared.get(slab.data_ptr())
        if shared is not None:
            self._pull(shared, slab, len(slab) // self._partition.size)
            return
        size, rank = self._partition.size, self._partition.rank
        ranges, buffers = slab.view(size, -1), self._buffer.own.view(size, -1)
        for begin in range(0, ranges.shape[1], buffers.shape[1]):
            pieces = ranges[:, begin : begin + buffers.shape[1]]
            num = pieces.shape[1]
            places = self._buffer.own[: size * num].view(size, num)
            places[rank].copy_(pieces[rank])
            self._pull(self._buffer, self._buffer.own[: size * num], num)
            pieces.copy_(places)

    def scatter(self, part: torch.Tensor, slab: torch.Tensor | None, source: int) -> None:
        """As `Ranks.scatter`: enqueued on the current stream."""
        size, rank = self._partition.size, self._partition.rank
        for begin in range(0, len(part), len(self._buffer.own) // size):
            piece = part[begin : begin + len(self._buffer.own) // size]
            num = len(piece)
            if slab is not None:
                self._buffer.own[: size * num].view(size, num).copy_(slab.view(size, -1)[:, begin : begin + num])
            self._buffer.barrier(_BEFORE)
            piece.copy_(self._buffer.of(source)[rank * num : (rank + 1) * num], non_blocking=True)
            self._buffer.barrier(_AFTER)

    def give_up(self) -> None:
        """Let all barriers pass from now on, until `close`; may be called again, by any thread."""
        if self._giving_up is None:
            self._giving_up = threading.Thread(target=self._pass_barriers, name="zinfer-give-up", daemon=True)
            self._giving_up.start()

    def close(self) -> None:
        """Free the memory; the device is done with it."""
        self._over.set()
        if self._giving_up is not None:
            self._giving_up.join()
        self._shared.clear()

    def _share(self, nbytes: int) -> "_SharedMemory":
        own = symmetric.empty(nbytes, dtype=torch.uint8, device=self._device)
        shared = _SharedMemory(own, symmetric.rendezvous(own, self._group), self._partition)
        self._shared[own.data_ptr()] = shared
        return shared

    def _pull(self, shared: "_SharedMemory", slab: torch.Tensor, num: int) -> None:
        """Copy the other ranks' ranges of ``num`` bytes, each at its place, once they are there."""
        size, rank = self._partition.size, self._partition.rank
        shared.barrier(_BEFORE)
        for peer in ((rank + step) % size for step in range(1, size)):  # no two ranks begin with the same one
            place = slice(peer * num, (peer + 1) * num)
            slab[place].copy_(shared.of(peer)[place], non_blocking=True)
        shared.barrier(_AFTER)

    def _pass_barriers(self) -> None:
        torch.cuda.set_device(self._device)
        with torch.cuda.stream(self._stream):
            while not self._over.wait(_REPEAT_S):
                for shared in [*self._shared.values()]:
                    shared.signal_for_all()
                self._stream.synchronize()


class _SharedMemory:
    """Memory of the same size on every rank, which all of them map.

    Args:
        own: this rank's (uint8).
        handle: of torch's symmetric memory.
    """

    def __init__(self, own: torch.Tensor, handle: Any, partition: Partition) -> None:
        self.own = own
        self._handle = handle
        rank, size = partition.rank, partition.size
        self._views = [handle.get_remote_tensor(peer, own.shape, own.dtype) for peer in range(size)]
        pads = [handle.get_signal_pad(peer, ((_AFTER + 1) * size,), torch.uint32) for peer in range(size)]
        # A barrier waits for 1 in each other rank's place of the own pad, and for 0 in the own place of theirs.
        self._awaited = [
            (pad, channel * size + place, value)
            for channel in (_BEFORE, _AFTER)
            for peer in range(size)
            if peer != rank
            for pad, place, value in ((pads[rank], peer, 1), (pads[peer], rank, 0))
        ]

    def of(self, rank: int) -> torch.Tensor:
        """A rank's memory."""
        return self._views[rank]  # type: ignore[no-any-return]

    def barrier(self, channel: int) -> None:
        """Make the current stream wait until those of all ranks are here."""
        self._handle.barrier(channel=channel)

    def signal_for_all(self) -> None:
        """Write what the other ranks would, on the current stream."""
        for pad, place, value in self._awaited:
            self._handle.stream_write_value32(pad, place, value)
