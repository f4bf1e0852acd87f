"""`StageExchange`: hands hidden states from each stage of a pipeline to the next, and logits from the last to all."""

import time
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Final

import torch
import torch.distributed as dist

from zinfer.ranks.model_ranks import ModelRanks
from zinfer.ranks.rank_store import growing_pauses

_MOST_SENDS: Final = 2
"""Sends under way: the next stage may still compute the pass before."""
_MOST_PAUSE_S: Final = 1e-3


class StageExchange:
    """This rank's connections to the other stages of its pipeline; made on all ranks in the same order.

    Two neighbours share a communicator of their own, and hidden states are broadcast in it: unlike sends, broadcasts
    over gloo can be asked whether they are done, so that a wait ends when a rank fails.

    Ranks that share a stage's slabs have rows, and passes, of their own. One that only waited for another stage would
    keep its ranges from them, and that stage may wait for one of them; so it serves them meanwhile, on the host.

    Attributes:
        serve: takes part in a use of a block by those that share this stage's slabs, returns whether one had asked for
            it; None if they are not shared.
    """

    def __init__(self, ranks: ModelRanks) -> None:
        self._ranks = ranks
        self.members = ranks.mesh.ranks_along("pipeline", ranks.group.rank)
        self._all = ranks.open_group(ranks.mesh.groups_in(("pipeline",)))
        rank = ranks.group.rank
        self._before: Any = None
        self._next: Any = None
        for members in ranks.mesh.groups_in(("pipeline",)):
            for pair in pairwise(members):
                made = ranks.open_group([pair])
                if rank == pair[1]:
                    self._before = made
                if rank == pair[0]:
                    self._next = made
        self._place = self.members.index(rank)
        self._sends: deque[tuple[Any, torch.Tensor]] = deque()
        self.serve: Callable[[], bool] | None = None

    def receive(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the hidden states of the stage before, which have this shape and dtype.

        On a CUDA device it is enqueued on the current stream.

        Raises:
            RankError: another rank failed.
        """
        found = torch.empty_like(hidden, memory_format=torch.contiguous_format)
        source = self.members[self._place - 1]
        self._wait(dist.broadcast(found, src=source, group=self._before, async_op=True))
        return found

    def send(self, hidden: torch.Tensor) -> None:
        """Begin to send hidden states to the next stage, which may receive them later; they are not changed until then.

        Raises:
            RankError: another rank failed.
        """
        while len(self._sends) >= _MOST_SENDS:
            self._wait(self._sends.popleft()[0])
        given = hidden.contiguous()
        source = self.members[self._place]
        self._sends.append((dist.broadcast(given, src=source, group=self._next, async_op=True), given))

    def share(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the last stage's tensor, of one shape on all stages; elsewhere what is given is overwritten.

        Raises:
            RankError: another rank failed.
        """
        given = tensor.contiguous()
        self._wait(dist.broadcast(given, src=self.members[-1], group=self._all, async_op=True))
        return given

    def finish(self) -> None:
        """Wait until all that was sent has arrived; nothing after a failure.

        Raises:
            RankError: another rank failed meanwhile.
        """
        while self._sends and self._ranks.failure is None:
            self._ranks.wait_for(self._sends.popleft()[0])
        self._sends.clear()

    def _wait(self, work: Any) -> None:
        pauses = growing_pauses(_MOST_PAUSE_S)
        while self.serve is not None and not work.is_completed():
            self._ranks.check()
            if self.serve():
                pauses = growing_pauses(_MOST_PAUSE_S)
            else:
                with self._ranks.progress.waiting():
                    time.sleep(next(pauses))
        self._ranks.wait_for(work)
