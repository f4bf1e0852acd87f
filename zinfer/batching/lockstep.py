"""Keeps the ranks that compute a model together in step: all of them make the same passes, in the same order.

[Note: one rank decides]
Ranks that divide each layer's products meet in collectives, which hang unless every rank computes the same tokens of
the same sequences. What a pass computes depends on the requests that have arrived by then, and they arrive at other
times on other ranks. So the group's first rank leads: before each pass it sends the others a `Step` with the requests
that were submitted, the calls that were cancelled, whether the prefix cache was dropped since the pass before, and the
order of the pass (`PassOrder`), which may follow from the seconds that passes took. The others apply these steps to
their own scheduler, and nothing else. All that follows from them is equal on all ranks: sizes are agreed when the model
is loaded, seeds are part of the requests, equal logits give equal tokens, and the scheduler reads neither clocks nor
the memory that is free.

A step carries requests, not only their numbers: a rank without calls of its own computes along. A rank that makes the
same calls as the first gets their results (`Claims`).

The first rank is ahead of the device by a pass, so the message costs no time there. Each step has a checksum of what
the first rank scheduled and sampled so far; a rank that finds another ends all, rather than hang or answer wrongly.
"""

from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

from zinfer.batching.agreement import agree
from zinfer.batching.handle import Handle
from zinfer.batching.request import SentRequest
from zinfer.errors import RankError
from zinfer.nvme.pool import start_thread
from zinfer.planning.kv_budget import BatchingBudget
from zinfer.ranks.member_links import open_member_links
from zinfer.ranks.model_ranks import ModelRanks
from zinfer.ranks.sockets import end_link
from zinfer.ranks.values import from_bytes, to_bytes
from zinfer.scheduling.pass_order import PassOrder
from zinfer.scheduling.schedule import PassSize


class Admitted(NamedTuple):
    """The requests of call ``number`` start."""

    number: int
    requests: tuple[SentRequest, ...]


class Cancelled(NamedTuple):
    """The unfinished requests of call ``number`` end."""

    number: int


class PrefixesDropped(NamedTuple):
    """The prefix cache is dropped, unless requests are under way."""


Change: TypeAlias = Admitted | Cancelled | PrefixesDropped


class Step(NamedTuple):
    """From the first rank: what to change, and the pass that follows.

    Attributes:
        changes: in order.
        order: of the pass that follows; None: there is none.
        checksum: of the passes before.
        is_last: whether the first rank ends its loop.
    """

    changes: Sequence[Change]
    order: PassOrder | None
    checksum: int
    is_last: bool = False


class Leader:
    """The first rank's side: it collects changes and sends them before each pass.

    Args:
        ranks: all ranks of the job.
        links: to the others that compute the same passes.

    Attributes:
        checksum: of this rank's passes.
    """

    def __init__(self, ranks: ModelRanks, links: Sequence[Connection]) -> None:
        self._ranks, self._links = ranks, links
        self.checksum = Checksum()
        self._changes: list[Change] = []
        self._numbers: WeakKeyDictionary[Handle, int] = WeakKeyDictionary()
        self._num_calls = 0
        self._is_over = False
        self._watcher = start_thread("zinfer-lockstep", self._watch, self._lose)

    def admit(self, handle: Handle) -> None:
        """Note that a call starts."""
        self._numbers[handle] = self._num_calls
        self._changes.append(Admitted(self._num_calls, tuple(request.sent for request in handle.requests)))
        self._num_calls += 1

    def cancel(self, handle: Handle) -> None:
        """Note that a call is cancelled."""
        if (number := self._numbers.get(handle)) is not None:
            self._changes.append(Cancelled(number))

    def drop_prefixes(self) -> None:
        """Note that the prefix cache is dropped."""
        self._changes.append(PrefixesDropped())

    def send(self, order: PassOrder | None = None, *, is_last: bool = False) -> None:
        """Send the changes since the last call; nothing if there are none and no pass follows.

        Args:
            order, is_last: as in `Step`.

        Raises:
            RankError: another rank failed.
        """
        self._ranks.check()
        if not (self._changes or order is not None or is_last):
            return
        self._is_over = is_last
        message = to_bytes(Step(self._changes, order, self.checksum.value, is_last))
        self._changes = []
        for link in self._links:
            try:
                link.send_bytes(message)
            except OSError as error:
                raise self._ranks.find_cause(error) from error

    def on_failure(self, call: Callable[[BaseException], None]) -> None:
        """Call from another thread once a rank has failed; a send under way ends then."""

        def end(failure: BaseException) -> None:
            self._end_links()
            call(failure)

        self._ranks.on_failure(end)
        if self._ranks.failure is not None:
            end(self._ranks.failure)

    def fail(self, failure: BaseException) -> None:
        """End the other ranks' loops."""
        self._ranks.fail(failure)

    def close(self) -> None:
        """End the connections."""
        self._is_over = True
        self._end_links()
        self._watcher.join()

    def _end_links(self) -> None:
        for link in self._links:
            end_link(link)

    def _watch(self) -> None:
        """Notice the end of another rank at once, also while this one computes or waits for requests."""
        wait(self._links)
        if not self._is_over:
            self._ranks.fail(self._ranks.find_cause(EOFError("its connection ended")))

    def _lose(self, failure: BaseException) -> None:
        if not self._is_over:
            self._ranks.fail(failure)


class Follower:
    """Another rank's side: it receives the first rank's steps.

    Args:
        ranks: all ranks of the job.
        first: the rank that leads.
        link: to it.

    Attributes:
        first_name: its name, for messages.
        checksum: of this rank's passes.
    """

    def __init__(self, ranks: ModelRanks, first: int, link: Connection) -> None:
        self._ranks, self._link = ranks, link
        self.first_name = ranks.name_of(first)
        self.checksum = Checksum()

    def listen(self, take: Callable[[Step], None], lose: Callable[[BaseException], None]) -> None:
        """Call from another thread, for each step as it arrives, and once a rank has failed.

        Args:
            take: called for each step.
            lose: called with the failure, perhaps several times.
        """
        self._ranks.on_failure(lose)
        if self._ranks.failure is not None:
            lose(self._ranks.failure)

        def listen() -> None:
            try:
                while True:
                    step: Step = from_bytes(self._link.recv_bytes())
                    take(step)
                    if step.is_last:
                        return
            except (EOFError, OSError) as error:
                lose(self._ranks.find_cause(error))

        start_thread("zinfer-lockstep", listen, lose)

    def check(self, step: Step) -> None:
        """Compare what this rank has computed with the first one.

        Raises:
            RankError: it differs, or another rank failed.
        """
        self._ranks.check()
        if step.checksum != self.checksum.value:
            raise RankError(
                f"{self._ranks.name_of(self._ranks.group.rank)} made another pass, or drew other tokens, than "
                f"{self.first_name}; give all ranks the same files, software and kind of device"
            )

    def fail(self, failure: BaseException) -> None:
        """End the other ranks' loops."""
        self._ranks.fail(failure)

    def close(self) -> None:
        """End the connection."""
        end_link(self._link)


class Checksum:
    """Of the passes and tokens so far, equal on ranks in step."""

    def __init__(self) -> None:
        self.value = 0

    def add(self, sizes: Sequence[PassSize], token_ids: Sequence[int]) -> None:
        """Add the sizes of launched passes, and the tokens that were received meanwhile."""
        self.value = hash((self.value, *sizes, tuple(token_ids)))  # of whole numbers alone: equal in every process


def open_lockstep(ranks: ModelRanks | None, budget: BatchingBudget) -> tuple[Leader | Follower | None, BatchingBudget]:
    """Connect the ranks that compute the same passes; called by all processes of a job.

    Returns:
        This rank's side, None if it computes its passes alone; and the budget that the ranks have agreed on.

    Raises:
        ConfigError: the ranks cannot agree on the sizes of pages, or on what is swapped.
        RankError: a rank failed.
    """
    members = (0,) if ranks is None else ranks.mesh.ranks_in_step(ranks.group.rank)
    if ranks is None or len(members) == 1:
        return None, budget
    budget = agree(ranks, members, budget)
    links = open_member_links(ranks, members)
    if ranks.group.rank == members[0]:
        return Leader(ranks, links), budget
    return Follower(ranks, members[0], links[0]), budget
