"""Exchanges among the GPUs of one host, by copies out of each other's memory.

[Note: copy engines] A collective of NCCL occupies multiprocessors and takes 8 % from the products beside it; copies
between GPUs run on copy engines, and only the barriers around them are kernels, of one block each. Slots therefore lie
in memory that every rank maps. Other tensors pass through a small buffer there; sums of small ones, which the products
after them wait for, are one kernel (`zinfer.kernels.peer_sum`).
"""

from collections.abc import Iterator
from typing import Final

import torch

from zinfer.kernels.peer_sum import MOST_PROGRAMS, sum_over_peers
from zinfer.offload.partition import Partition
from zinfer.ranks.peer_memory import NUM_BARRIERS, PeerMemory, SharedMemory

_BUFFER_BYTES: Final = 32 << 20  # some 100 us of NVLink: the barriers around it cost a tenth
_BEFORE, _BETWEEN, _AFTER = range(3)  # channels of barriers
MOST_READ_BYTES: Final = 1 << 20
"""Of a sum that is one kernel: up to here reading all that the others have costs less than another barrier."""
_SUMS: Final = NUM_BARRIERS  # the first channel of the kernel of sums


class PeerCommunicator:
    """Implements `Communicator`; made on all ranks in the same order.

    Args:
        memory: that the ranks share.
    """

    def __init__(self, memory: PeerMemory) -> None:
        self._memory = memory
        self.partition: Partition = memory.partition
        self._slots: dict[int, SharedMemory] = {}  # by address
        self.can_capture = self.can_share = True
        self._buffer = memory.share(_BUFFER_BYTES, _SUMS + MOST_PROGRAMS)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """As `Communicator.allocate`."""
        shared = self._memory.share(nbytes)
        self._slots[shared.own.data_ptr()] = shared
        return shared.own

    def share(self, nbytes: int) -> SharedMemory:
        """As `Communicator.share`."""
        return self._memory.share(nbytes, num_channels=0)

    def gather(self, slab: torch.Tensor) -> None:
        """As `Communicator.gather`."""
        shared = self._slots.get(slab.data_ptr())
        if shared is not None:
            self._pull(shared, len(slab) // self.partition.size)
            return
        size, rank = self.partition.size, self.partition.rank
        ranges = slab.view(size, -1)
        for part in self._parts(ranges.shape[1]):
            pieces = ranges[:, part]
            places = self._buffer.own[: pieces.numel()].view_as(pieces)
            places[rank].copy_(pieces[rank])
            self._pull(self._buffer, pieces.shape[1])
            pieces.copy_(places)

    def scatter(self, part: torch.Tensor, slab: torch.Tensor | None, source: int) -> None:
        """As `Communicator.scatter`."""
        size, rank = self.partition.size, self.partition.rank
        for place in self._parts(len(part)):
            piece = part[place]
            num = len(piece)
            if slab is not None:
                self._buffer.own[: size * num].view(size, num).copy_(slab.view(size, -1)[:, place])
            self._buffer.barrier(_BEFORE)
            piece.copy_(self._buffer.of(source)[rank * num : (rank + 1) * num], non_blocking=True)
            self._buffer.barrier(_AFTER)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """As `Communicator.all_reduce`: summed in fp32, in the order of the ranks, so that all get the same bits."""
        tensor = tensor.contiguous()
        flat = tensor.view(-1)
        num_each = _BUFFER_BYTES // tensor.element_size()
        for begin in range(0, len(flat), num_each):
            self._sum(flat[begin : begin + num_each])
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """As `Communicator.all_gather`."""
        size, rank = self.partition.size, self.partition.rank
        found = tensor.new_empty((size, *tensor.shape))
        found[rank].copy_(tensor)
        self.gather(found.view(size, -1).view(torch.uint8).view(-1))
        return found

    def give_up(self) -> None:
        """As `Communicator.give_up`."""
        self._memory.give_up()

    def close(self) -> None:
        """As `Communicator.close`."""
        self._slots.clear()
        self._memory.close()

    def _parts(self, num: int) -> Iterator[slice]:
        """Cut ``num`` bytes of each rank into parts of which the buffer holds one of each."""
        each = _BUFFER_BYTES // self.partition.size
        return (slice(begin, min(begin + each, num)) for begin in range(0, num, each))

    def _pull(self, shared: SharedMemory, num: int) -> None:
        """Copy the other ranks' ranges of ``num`` bytes, each at its place, once they are there."""
        shared.barrier(_BEFORE)
        self._copy_others(shared, num)
        shared.barrier(_AFTER)

    def _copy_others(self, shared: SharedMemory, num: int) -> None:
        size, rank = self.partition.size, self.partition.rank
        for peer in ((rank + step) % size for step in range(1, size)):  # no two ranks begin with the same one
            place = slice(peer * num, (peer + 1) * num)
            shared.own[place].copy_(shared.of(peer)[place], non_blocking=True)

    def _sum(self, flat: torch.Tensor) -> None:
        """Sum a tensor that fits the buffer: all of it, or if that is long, this rank's range, and copy the others'."""
        size, rank = self.partition.size, self.partition.rank
        each = len(flat) // size
        if flat.nbytes <= MOST_READ_BYTES or each * size < len(flat):
            sum_over_peers(flat, self._buffer.addresses, self._buffer.pads, _SUMS, rank)
            return
        views = [self._buffer.of(peer)[: flat.nbytes].view(flat.dtype) for peer in range(size)]
        views[rank].copy_(flat)
        self._buffer.barrier(_BEFORE)
        own = slice(rank * each, (rank + 1) * each)
        total = views[0][own].to(torch.float32, copy=True)
        for view in views[1:]:
            total += view[own]
        views[rank][own] = total.to(flat.dtype)  # which no other rank reads before the next barrier
        self._buffer.barrier(_BETWEEN)
        self._copy_others(self._buffer, each * flat.element_size())
        self._buffer.barrier(_AFTER)
        flat.copy_(views[rank])
