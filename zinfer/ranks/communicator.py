"""Exchanges of tensors among the ranks of one mode of the mesh."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from zinfer.offload.partition import Partition
from zinfer.offload.ranks import Shared
from zinfer.ranks.mapped_memory import MappedMemory

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # before torch 2.13


class Communicator(Protocol):
    """The ranks of one mode. All of them make the same calls in the same order.

    On a CUDA device work is enqueued on the current stream; after a failure the results hold anything. Every method
    raises RankError once a rank of the job has failed.

    Attributes:
        can_capture: whether its work can be captured in CUDA graphs, which all ranks replay in the same order.
        can_share: whether the ranks can map memory of each other.
    """

    can_capture: bool
    can_share: bool

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return memory of a slot (uint8), which `gather` fills fastest."""

    def share(self, nbytes: int) -> Shared:
        """As `zinfer.offload.ranks.Ranks.share`, if `can_share`."""

    def gather(self, slab: torch.Tensor) -> None:
        """As `zinfer.offload.ranks.Ranks.gather`."""

    def scatter(self, part: torch.Tensor, slab: torch.Tensor | None, source: int) -> None:
        """As `zinfer.offload.ranks.Ranks.scatter`."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of the ranks' tensors, the same bits on all; in place if the tensor is contiguous."""

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the ranks' tensors of one shape as [ranks, *shape]."""

    def give_up(self) -> None:
        """Let the device end work that waits for a rank that has failed; may be called again, by any thread."""

    def close(self) -> None:
        """Free the memory; the device is done with it."""


class TorchCommunicator:
    """Implements `Communicator` by torch.distributed: gloo, or NCCL.

    Args:
        group: torch's.
        members: the ranks of the group.
        partition: this rank's place among them.
        device: of the tensors.
        check: raises the error of a rank that has failed.
        wait_for: waits for a collective, as `ModelRanks.wait_for`.
        can_share: whether the ranks are processes of one host, whose tensors are in its memory.
        exchange: returns the value of every rank of the group.
    """

    def __init__(
        self,
        group: Any,
        members: tuple[int, ...],
        partition: Partition,
        device: torch.device,
        check: Callable[[], None],
        wait_for: Callable[[Any], None],
        can_share: bool,
        exchange: Callable[[Any], Sequence[Any]],
    ) -> None:
        self.group, self.partition = group, partition
        self._members, self._device = members, device
        self._check, self._wait_for = check, wait_for
        self._has_given_up = False
        self.can_capture = False  # its waits look for ranks that have failed
        self.can_share = can_share
        self._exchange = exchange

    def allocate(self, nbytes: int) -> torch.Tensor:
        """As `Communicator.allocate`."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def share(self, nbytes: int) -> MappedMemory:
        """As `Communicator.share`."""
        return MappedMemory(nbytes, self._exchange, self.partition.rank)

    def gather(self, slab: torch.Tensor) -> None:
        """As `Communicator.gather`."""
        own = self.partition.own_range(slab, slab.nbytes)
        self._wait_for(_all_gather(slab, own, group=self.group, async_op=True))

    def scatter(self, part: torch.Tensor, slab: torch.Tensor | None, source: int) -> None:
        """As `Communicator.scatter`."""
        ranges = None if slab is None else list(torch.chunk(slab, self.partition.size))
        self._wait_for(dist.scatter(part, ranges, src=self._members[source], group=self.group, async_op=True))

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """As `Communicator.all_reduce`."""
        self._check()
        tensor = tensor.contiguous()
        self._wait_for(dist.all_reduce(tensor, group=self.group, async_op=True))
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """As `Communicator.all_gather`."""
        self._check()
        found = tensor.new_empty((self.partition.size, *tensor.shape))
        self._wait_for(_all_gather(found.view(-1), tensor.contiguous().view(-1), group=self.group, async_op=True))
        return found

    def give_up(self) -> None:
        """As `Communicator.give_up`; waits on the host end by themselves."""
        if self._device.type == "cuda" and not self._has_given_up:
            self._has_given_up = True
            self.group.abort()

    def close(self) -> None:
        """As `Communicator.close`."""
