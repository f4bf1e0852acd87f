"""A connection to the store that rank 0 keeps: small values by key, for all ranks of a model."""

import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import Any, Final, TypeVar

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from zinfer.errors import RankError
from zinfer.nvme.pool import Pool
from zinfer.ranks.sockets import SILENCE_S

_LEAST_PAUSE_S: Final = 20e-6
_MOST_PAUSE_S: Final = 2e-3  # less than a block takes on its way
_LOOK_S: Final = 1.0  # for what another connection has found
_RETURN_S: Final = 1.0
_T = TypeVar("_T")


def growing_pauses(most_s: float) -> Iterator[float]:
    """Yield the seconds to sleep between questions: little at first, then twice as much each time."""
    pause_s = _LEAST_PAUSE_S
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, most_s)


class RankStore:
    """One thread's connection. Every method raises RankError once rank 0, and with it the store, is gone or silent.

    The calls run in a thread of the connection, because torch's own never return if the other end is stopped.

    Args:
        connect: returns a connection to rank 0.
        prefix: of the model's keys.
        gone: makes the error from the reason; None: no answer came.
        lost: returns the error that another connection has met, if any.
    """

    def __init__(
        self,
        connect: Callable[[], Store],
        prefix: str,
        gone: Callable[[str | None], RankError],
        lost: Callable[[], RankError | None],
    ) -> None:
        self._gone, self._lost = gone, lost
        self._is_over = False
        self._calls = Pool(1, "zinfer-store")
        self._store = self._ask(lambda: PrefixStore(prefix, connect()))

    def set(self, key: str, value: bytes | str) -> None:
        """Set a key."""
        self._ask(lambda: self._store.set(key, value))  # type: ignore[arg-type]  # takes bytes too

    def get(self, key: str) -> bytes:
        """Return the value of a key that is set."""
        return self._ask(lambda: bytes(self._store.get(key)))

    def has(self, *keys: str) -> bool:
        """Whether all keys are set."""
        return self._ask(lambda: bool(self._store.check(list(keys))))

    def set_once(self, key: str, value: str) -> str:
        """Set a key unless it is set; returns its value."""
        return self._ask(lambda: bytes(self._store.compare_set(key, "", value)).decode())

    def add(self, key: str, number: int) -> int:
        """Add to a counter; returns its new value."""
        return self._ask(lambda: int(self._store.add(key, number)))

    def delete(self, key: str) -> None:
        """Delete a key."""
        self._ask(lambda: self._store.delete_key(key))

    def arrives(self, key: str, timeout_s: float) -> bool:
        """Whether a key is set within the timeout. Asks again and again: `Store.wait` logs every timeout it meets."""

        def poll() -> bool:
            until_s, pauses = time.monotonic() + timeout_s, growing_pauses(_MOST_PAUSE_S)
            while not self._store.check([key]):
                if self._is_over or time.monotonic() >= until_s:
                    return False
                time.sleep(next(pauses))
            return True

        return self._ask(poll, timeout_s + SILENCE_S)

    def close(self) -> None:
        """End the thread; not after a failure, when it may never end."""
        self._calls.close()

    def _ask(self, call: Callable[[], _T], timeout_s: float = SILENCE_S) -> _T:
        answer = self._calls.submit(call)
        for _ in range(math.ceil(timeout_s / _LOOK_S)):  # seconds while this process runs, and not while it is stopped
            if (failure := self._lost()) is not None:
                self._leave_alone(answer)
                raise failure
            try:
                return answer.result(_LOOK_S)
            except TimeoutError:
                continue
            except RuntimeError as error:
                raise self._gone(str(error).splitlines()[0]) from error
        self._leave_alone(answer)
        raise self._gone(None)

    def _leave_alone(self, answer: Future[Any]) -> None:
        """Wait for a call under way, which a stopped rank never answers.

        If it returned once Python has ended, C++ would abort the process.
        """
        self._is_over = True
        wait([answer], _RETURN_S)
