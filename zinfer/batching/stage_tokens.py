"""Brings the tokens that the last stage of a pipeline draws to the other stages.

They go from host to host: a stage needs them to decide what follows, and the first one as the inputs of a later pass.
The last stage sends a pass's tokens as soon as they are on its host, while it computes the next pass.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from multiprocessing.connection import Connection
from typing import Final, NamedTuple, Protocol

from zinfer.errors import RankError
from zinfer.nvme.pool import Pool
from zinfer.ranks.member_links import open_member_links
from zinfer.ranks.model_ranks import ModelRanks
from zinfer.ranks.sockets import end_link
from zinfer.ranks.values import from_bytes, to_bytes
from zinfer.sampling.sampler import Drawn, Sampled

_BEAT_S: Final = 1.0


class Coming(Protocol):
    """The tokens of a pass, which `take` waits for."""

    def take(self) -> Sampled: ...


class Looked(Protocol):
    """Says where infinities or NaN came first in a pass whose tokens were taken, as `Looks`."""

    def where(self) -> str | None: ...


class _Message(NamedTuple):
    """The tokens of pass ``number``, counted from 0, and what the last stage says of its layers (`Looked.where`)."""

    number: int
    sampled: Sampled
    where: str | None


class StageResult:
    """The tokens of a pass, the same on all stages; `where` is known once they are taken."""

    def __init__(self, wait: Callable[[], _Message]) -> None:
        self._wait = wait
        self._where: str | None = None

    def take(self) -> Sampled:
        """Wait for the tokens.

        Raises:
            RankError: another rank failed.
        """
        message = self._wait()
        self._where = message.where
        return message.sampled

    def where(self) -> str | None:
        """As `Looked.where`, of the last stage's layers and what reaches them."""
        return self._where


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

    def share(self, drawn: Drawn, looks: Looked) -> StageResult:
        """Send a pass's tokens, and what its looks found, to the other stages once they are on the host."""
        assert self._sender is not None, "only the last stage draws"
        number, self._num_passes = self._num_passes, self._num_passes + 1

        def send() -> _Message:
            message = _Message(number, drawn.take(), looks.where())
            data = to_bytes(message)
            for link in self._links:
                link.send_bytes(data)
            return message

        return StageResult(partial(self._sent, self._sender.submit(send)))

    def expect(self) -> StageResult:
        """Return what waits for the next pass's tokens; those of passes that nobody waited for are dropped."""
        number, self._num_passes = self._num_passes, self._num_passes + 1
        return StageResult(partial(self._received, number))

    def close(self) -> None:
        """End the connections."""
        if self._sender is not None:
            self._sender.close()
        self._end_links()

    def _sent(self, sent: "Future[_Message]") -> _Message:
        while wait([sent], _BEAT_S).not_done:  # `result` would raise a TimeoutError, which is an OSError too
            self._ranks.check()
        try:
            return sent.result()
        except OSError as error:
            raise self._ranks.find_cause(error) from error

    def _received(self, number: int) -> _Message:
        try:
            while True:
                message: _Message = from_bytes(self._links[0].recv_bytes())
                if message.number == number:
                    return message
                if message.number > number:
                    raise RankError(f"the last stage has dropped pass {number}, which this rank made")
        except (EOFError, OSError) as error:
            raise self._ranks.find_cause(error) from error

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
