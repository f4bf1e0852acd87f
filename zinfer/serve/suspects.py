"""`Suspects`: finds the request that ends replicas, so that it alone fails and those beside it are answered.

[Note: suspects] When a replica ends, or a pass of it fails, each request that was under way there may be the cause.
These suspects are tried again one at a time, the latest first, beside requests that are not suspected. A suspect is
cleared once it has more tokens than before, or else its answer: then the next one begins. If a replica ends with one
suspect on it, and nothing else that may be the cause, that one is the cause, and fails.

New requests may be causes too. So while suspects are tried one at a time, those run only where all others are cleared,
and new requests run elsewhere: on replicas that have not ended. Where there is none, they wait.

Most ends have other causes, and where weights stream a trial may take hours. So it is one at a time for a minute only,
then two, four and so on, beside new requests. If a replica ends with several on it that may be the cause, all of these
are suspected and tried, for longer each. A cleared request may still end a replica at a later token, which the one on
trial is blamed for; so those that are lost time and again are suspected again.
"""

import asyncio
import time
from bisect import insort
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Final

from zinfer.serve.errors import Lost, RequestFailed

_GROWS_EVERY_S: Final = 60.0
_MORE_PATIENT: Final = 8.0
_MAX_LOST: Final = 8
"""Attempts of a request that is neither cleared nor found to be the cause: then no request can be answered."""
_MAX_LOST_CLEARED: Final = 3
"""Ends of replicas after which a cleared request is suspected of the next one too."""


class Case:
    """One request, and whether it is suspected of the end of a replica."""

    _numbers = count()

    def __init__(self, *, is_suspect: bool = False) -> None:
        self.number = next(self._numbers)
        self.is_suspect = is_suspect
        self.is_cause = self.is_cleared = False
        self.replica: object = None  # on which it runs
        self.num_lost = 0
        self.num_tokens = self.num_reached = 0


class Suspects:
    """The requests that are under way, and which of them are suspected.

    ``num_notes`` is how often a suspicion has changed.
    """

    def __init__(self) -> None:
        self.num_notes = 0
        self._waiting: list[tuple[tuple[int, int], Case, asyncio.Future[None]]] = []  # most often lost, latest first
        self._under_way: set[Case] = set()
        self._suspected: set[Case] = set()  # of those under way
        self._on_trial: set[Case] = set()
        self._ended: set[object] = set()  # replicas for trials
        self._lost_s = time.monotonic()  # when requests were lost last
        self._grows_every_s = _GROWS_EVERY_S

    @contextmanager
    def under_way(self, case: Case) -> Iterator[None]:
        """Know a request until it is answered, fails, or is given up."""
        self._under_way.add(case)
        if case.is_suspect:
            self._suspected.add(case)
        try:
            yield
        finally:
            self._under_way.discard(case)
            self._end_suspicion(case)
            self._end_trial(case)

    def may_run(self, case: Case, replica: object) -> bool:
        """Whether a request may be sent to a replica now."""
        if not self._suspected or self._num_at_once > 1:
            return True
        if case.is_suspect:
            return all(each is case or each.is_cleared for each in self._under_way if each.replica is replica)
        return case.is_cleared or replica not in self._ended

    async def turn(self, case: Case) -> None:
        """Wait until a request may be sent to a replica: at once, unless it is suspected."""
        if not case.is_suspect:
            return
        entry = (-case.num_lost, -case.number), case, asyncio.get_running_loop().create_future()
        insort(self._waiting, entry, key=lambda each: each[0])
        try:
            while not entry[2].done():
                self._let_begin()
                await asyncio.wait((entry[2],), timeout=self._grows_every_s)
        except asyncio.CancelledError:
            if entry in self._waiting:
                self._waiting.remove(entry)
            raise

    def advance(self, case: Case, num_tokens: int) -> None:
        """Note that a request got more tokens."""
        case.num_tokens += num_tokens
        if case.is_suspect and case.num_tokens > case.num_reached:
            case.is_suspect, case.is_cleared, case.num_lost = False, True, 0
            self.num_notes += 1
            self._end_suspicion(case)
            self._end_trial(case)

    def note(self, lost: Lost, case: Case) -> None:
        """Note that a request was lost with others, each of which calls this.

        Raises:
            RequestFailed: it is the cause, or was lost too often.
        """
        if not lost.is_noted:
            lost.is_noted = True
            self._judge(lost, [each for each in lost.requests if isinstance(each, Case) and each in self._under_way])
        case.num_reached, case.num_tokens = max(case.num_reached, case.num_tokens), 0
        self._end_trial(case)
        if case.is_cause:
            raise RequestFailed(f"{lost.reason}; this request was the cause, twice, and is not tried again")
        if case.num_lost >= _MAX_LOST:
            raise RequestFailed(f"{lost.reason}; this request was tried {case.num_lost} times, and is not tried again")

    def _judge(self, lost: Lost, cases: Sequence[Case]) -> None:
        self.num_notes += 1
        self._lost_s = time.monotonic()
        possible = [each for each in cases if not each.is_cleared or each.num_lost >= _MAX_LOST_CLEARED] or cases
        was_tried = any(each.is_suspect for each in possible)
        self._grows_every_s = self._grows_every_s * _MORE_PATIENT if was_tried and len(possible) > 1 else _GROWS_EVERY_S
        for each in cases:
            self._ended.add(each.replica)
            each.replica = None
            each.num_lost += 1
        for each in possible:
            each.is_cause = was_tried and len(possible) == 1
            each.is_suspect, each.is_cleared = True, False
            self._suspected.add(each)

    def _end_suspicion(self, case: Case) -> None:
        self._suspected.discard(case)
        if not self._suspected:
            self._ended.clear()

    def _end_trial(self, case: Case) -> None:
        if case in self._on_trial:
            self._on_trial.discard(case)
            self._let_begin()

    @property
    def _num_at_once(self) -> int:
        return 1 << int((time.monotonic() - self._lost_s) / self._grows_every_s)

    def _let_begin(self) -> None:
        """Let as many suspects begin as may be tried at once."""
        while self._waiting and len(self._on_trial) < self._num_at_once:
            _, case, begins = self._waiting.pop(0)
            self._on_trial.add(case)
            begins.set_result(None)
