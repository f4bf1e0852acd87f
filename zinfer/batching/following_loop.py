"""The serving loop of a rank that follows the first one of its group: it computes what that one computes.

Nothing that happens on this rank changes its passes: calls only claim the results of the first rank's equal calls, and
cancelling one here has no effect. The loop ends when the first rank has ended its own and this rank is closed too.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import Empty
from typing import Final

import torch

from zinfer.batching.batcher import Batcher
from zinfer.batching.claims import DROP, Claims, LedCall, LedDrop
from zinfer.batching.handle import Handle, Token
from zinfer.batching.lockstep import Admitted, Cancelled, Change, Follower, PrefixesDropped, Step
from zinfer.batching.request import Request, SentRequest
from zinfer.batching.serving_loop import ServingLoop
from zinfer.errors import RankError
from zinfer.ranks.sockets import SILENCE_S
from zinfer.requests.completion import Completion

_LOOK_S: Final = 10.0  # how soon a call that waits too long is noticed
_MOST_WAIT_S: Final = 20 * SILENCE_S  # as long as ranks wait for one another in collectives


class FollowingLoop(ServingLoop):
    """A serving loop whose passes are those of another rank.

    Args:
        follower: receives that rank's steps.
        receive: makes a request that was sent.
    """

    def __init__(
        self,
        batcher: Batcher,
        device: torch.device,
        closers: Sequence[Callable[[], object]],
        follower: Follower,
        receive: Callable[[SentRequest], Request],
    ) -> None:
        self._follower, self._receive = follower, receive
        self._claims = Claims()
        self._calls: dict[int, LedCall] = {}  # the unfinished ones
        self._is_led = True
        self._lost: BaseException | None = None
        super().__init__(batcher, device, closers)
        follower.listen(lambda step: self._commands.put(partial(self._take, step)), self._lose)

    def submit(self, handle: Handle) -> None:
        """Let a handle get the results of the first rank's equal call.

        Raises:
            RankError: the first rank has ended.
            RuntimeError: as `ServingLoop.submit`.
        """
        self._check_caller()
        self._claims.claim(tuple(request.sent.call for request in handle.requests), handle)

    def cancel(self, handle: Handle) -> None:
        """Nothing: the first rank decides whether the call is cancelled."""

    def drop_prefixes(self) -> None:
        """Wait until the first rank has dropped the prefix cache, and this one with it."""
        self._check_caller()
        done: Future[None] = Future()
        self._claims.claim(DROP, done)
        done.result()

    def stop(self) -> None:
        """Compute along until the first rank ends; no more calls are made here."""
        super().stop()
        self._claims.keep_none()

    def _serve(self) -> None:
        try:
            while self._is_led or not self._closing:
                if self._is_led and self._lost is not None:
                    raise self._lost
                with suppress(Empty):
                    self._commands.get(timeout=_LOOK_S)()
                self._claims.fail_waiting(self._late, _MOST_WAIT_S)
        except BaseException as failure:
            self._is_led = False
            self._follower.fail(failure)
            raise

    def _late(self) -> RankError:
        return RankError(
            f"{self._follower.first_name} has not made the same call in {_MOST_WAIT_S} s; ranks that share a model "
            "make the same calls with the same arguments"
        )

    def _take(self, step: Step) -> None:
        if not self._is_led or self._lost is not None:
            return
        self._follower.check(step)
        for change in step.changes:
            self._apply(change)
        if step.order is not None:
            self._pass(step.order)
            self._follower.checksum.add(self._batcher.pass_sizes[-1:], self._batcher.received_ids)
        if step.is_last:
            self._is_led = False
            self._end_all(RankError(f"{self._follower.first_name} has closed its LLM"))

    def _apply(self, change: Change) -> None:
        match change:
            case Admitted(number, content):
                call = LedCall(number, content, [self._receive(each) for each in content])
                if call.requests:
                    self._calls[number] = call
                self._claims.lead(call)
                self._begin(call)
            case Cancelled(number):
                if (found := self._calls.get(number)) is not None:
                    self._end_requests(found.requests)
            case PrefixesDropped():
                self._claims.lead(LedDrop(self._drop_prefixes()))

    def _deliver(self, request: Request, event: Token | Completion) -> None:
        call = self._handles[request]
        super()._deliver(request, event)
        if isinstance(call, LedCall) and call.is_complete:
            del self._calls[call.number]

    def _end_all(self, error: BaseException) -> None:
        super()._end_all(error)
        self._claims.end(error)

    def _lose(self, failure: BaseException) -> None:
        """End the loop because a rank has failed; called by other threads."""
        self._lost = self._lost or failure
        self._commands.put(lambda: None)
