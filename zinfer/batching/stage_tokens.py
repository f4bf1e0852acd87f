"""Brings the tokens that the last stage of a pipeline draws to the other stages.

They go from host to host: a stage needs them to decide what follows, and the first one as the inputs of a later pass.
The last stage sends a pass's tokens as soon as they are on its host, while it computes the next pass.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Final, NamedTuple, Protocol

from zinfer.errors import RankError
from zinfer.nvme.pool import Pool
from zinfer.ranks.links import end_link
from zinfer.ranks.member_links import open_member_links
from zinfer.ranks.model_ranks import ModelRanks
from zinfer.sampling.sampler import Drawn, Sampled

_BEAT_S: Final = 1.0


class Coming(Protocol):
    """The tokens of a pass, which `take` waits for."""

    def take(self) -> Sampled: ...


class _Message(NamedTuple):
    """The tokens of pass ``number``, counted from 0."""

    number: int
    sampled: Sampled


class StageTokens:
    """One stage's side; every stage calls `share` or `expect` once for each pass, in the same order.

    Args:
        ranks: all ranks of the job.
        links: on the last stage to all others, elsewhere to the last.
        is_last: whether this is the last stage.
    """

    def __init__(self, ranks: ModelRanks, links: Sequence[Connection], *, is_last: bool) -> None:
        self._ranks, self._links = ranks, links
        self.is_last = is_last
        self._num_passes = 0
        self._sender = Pool(1, "zinfer-tokens") if is_last else None
        ranks.on_failure(lambda failure: self._end_links())
        if ranks.failure is not None:
            self._end_links()

    def share(self, drawn: Drawn) -> Coming:
        """Send a pass's tokens to the other stages once they are on the host."""
        assert self._sender is not None, "only the last stage draws"
        number, self._num_passes = self._num_passes, self._num_passes + 1

        def send() -> Sampled:
            message = _Message(number, drawn.take())
            for link in self._links:
                link.send(message)
            return message.sampled

        return _Sent(self._ranks, self._sender.submit(send))

    def expect(self) -> Coming:
        """Return what waits for the next pass's tokens; those of passes that nobody waited for are dropped."""
        number, self._num_passes = self._num_passes, self._num_passes + 1
        return _Received(self._ranks, self._links[0], number)

    def close(self) -> None:
        """End the connections."""
        if self._sender is not None:
            self._sender.close()
        self._end_links()

    def _end_links(self) -> None:
        for link in self._links:
            end_link(link)


def open_tokens(ranks: ModelRanks) -> StageTokens:
    """Connect the last stage of this rank's pipeline with the others; called by all processes of a job.

    Raises:
        RankError: a rank failed.
    """
    *others, last = ranks.mesh.ranks_along("pipeline", ranks.group.rank)
    return StageTokens(ranks, open_member_links(ranks, [last, *others]), is_last=ranks.group.rank == last)


class _Sent(NamedTuple):
    ranks: ModelRanks
    sampled: "Future[Sampled]"

    def take(self) -> Sampled:
        """Raises RankError if another rank failed."""
        while True:
            with suppress(TimeoutError):
                try:
                    return self.sampled.result(_BEAT_S)
                except OSError as error:
                    raise self.ranks.find_cause(error) from error
            self.ranks.check()


class _Received(NamedTuple):
    ranks: ModelRanks
    link: Connection
    number: int

    def take(self) -> Sampled:
        """Raises RankError if another rank failed."""
        try:
            while True:
                message: _Message = self.link.recv()
                if message.number == self.number:
                    return message.sampled
                if message.number > self.number:
                    raise RankError(f"the last stage has dropped pass {self.number}, which this rank made")
        except (EOFError, OSError) as error:
            raise self.ranks.find_cause(error) from error
