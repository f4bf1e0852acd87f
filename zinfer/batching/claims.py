"""Pairs the calls that this rank makes with the equal ones of the group's first rank, which all ranks compute.

Ranks make the same calls, but not at the same time, and several threads make them in another order on each rank. So
calls are paired by their requests. Of two equal calls the one made first here gets the results of the one made first
there; a random seed is the first rank's.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Final, NamedTuple, TypeAlias

from zinfer.batching.handle import Event, Handle
from zinfer.batching.request import Request, SentRequest
from zinfer.requests.completion import Completion

Own: TypeAlias = "Handle | Future[None]"
DROP: Final = "drop the prefix cache"
"""The content of a `LedDrop`."""


class LedCall:
    """A call of the first rank: its results go to the handle that claims it, and are kept until then.

    Args:
        number: place in the order of the first rank's calls.
        content: its requests as they were received; those of the claiming calls may have other random seeds.
        requests: the same for this rank's batcher.

    Attributes:
        is_complete: whether all requests have their completions.
    """

    def __init__(self, number: int, content: Sequence[SentRequest], requests: Sequence[Request]) -> None:
        self.number, self.requests = number, requests
        self.content = tuple(each.call for each in content)
        self._num_left = len(requests)
        self._lock = threading.Lock()
        self._unread: list[Event | BaseException] | None = []
        self._handle: Handle | None = None
        self._own: dict[Request, Request] = {}

    def put(self, event: Event | BaseException) -> None:
        """Add a result, as `Handle.put`."""
        self._num_left -= not isinstance(event, BaseException) and isinstance(event[1], Completion)
        with self._lock:
            if self._handle is not None:
                self._pass_on(self._handle, event)
            elif self._unread is not None:
                self._unread.append(event)

    @property
    def is_complete(self) -> bool:
        return not self._num_left

    def claim(self, own: Own) -> None:
        """Give all results to a handle of equal requests."""
        assert isinstance(own, Handle)
        with self._lock:
            self._handle = own
            self._own = dict(zip(self.requests, own.requests, strict=True))
            for event in self._unread or ():
                self._pass_on(own, event)
            self._unread = None

    def drop(self) -> None:
        """Keep no results."""
        with self._lock:
            self._unread = None

    def _pass_on(self, handle: Handle, event: Event | BaseException) -> None:
        handle.put(event if isinstance(event, BaseException) else (self._own[event[0]], event[1]))


class LedDrop(NamedTuple):
    """The first rank dropped the prefix cache, or failed to."""

    failure: BaseException | None
    content: str = DROP

    def claim(self, own: Own) -> None:
        """Let a call for the same return, or raise the same."""
        assert isinstance(own, Future)
        if self.failure is None:
            own.set_result(None)
        else:
            own.set_exception(self.failure)

    def drop(self) -> None:
        """Nothing is kept."""


class _Waiting(NamedTuple):
    """A call of this rank that the first rank has not made yet."""

    content: object
    own: Own
    since_s: float

    def fail(self, error: BaseException) -> None:
        if isinstance(self.own, Handle):
            self.own.put(error)
        else:
            self.own.set_exception(error)


class Claims:
    """The calls of either side that wait for their equals. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._led: list[LedCall | LedDrop] = []
        self._waiting: list[_Waiting] = []
        self._end: BaseException | None = None
        self._keeps = True

    def lead(self, call: LedCall | LedDrop) -> None:
        """Take a call of the first rank."""
        with self._lock:
            for place, each in enumerate(self._waiting):
                if each.content == call.content:
                    del self._waiting[place]
                    call.claim(each.own)
                    return
            if self._keeps:
                self._led.append(call)
            else:
                call.drop()

    def claim(self, content: object, own: Own) -> None:
        """Let a call get the results of an equal one of the first rank, which may be over or still to come.

        Args:
            content: the requests as they are sent, or `DROP`.

        Raises:
            RankError: the first rank makes no more calls.
        """
        with self._lock:
            for place, call in enumerate(self._led):
                if call.content == content:
                    del self._led[place]
                    call.claim(own)
                    return
            if self._end is not None:
                raise self._end
            self._waiting.append(_Waiting(content, own, time.monotonic()))

    def keep_none(self) -> None:
        """Drop the results that nobody has claimed, and those to come: this rank makes no more calls."""
        with self._lock:
            self._keeps = False
            for call in self._led:
                call.drop()
            self._led.clear()

    def fail_waiting(self, make_error: Callable[[], BaseException], least_s: float) -> None:
        """End the calls that have waited for so many seconds."""
        until_s = time.monotonic() - least_s
        with self._lock:
            for each in [each for each in self._waiting if each.since_s <= until_s]:
                self._waiting.remove(each)
                each.fail(make_error())

    def end(self, error: BaseException) -> None:
        """End the calls that wait; later ones raise ``error`` unless their results are here already."""
        with self._lock:
            self._end = error
        self.fail_waiting(lambda: error, 0)
