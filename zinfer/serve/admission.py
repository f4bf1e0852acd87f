"""`Admission`: how many sequences are under way, and whose; more are refused."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import prometheus_client

from zinfer.serve.errors import ApiError


class Admission:
    """Counts sequences under way.

    Args:
        most: at once.
        is_shared: among several callers. One has then at most as many as are left to the others: half if it is the
            only one, a third if there are two such; so nobody's requests can shut out somebody else's.
        refused: counts the calls that were refused.
    """

    def __init__(self, most: int, *, is_shared: bool, refused: prometheus_client.Counter) -> None:
        self._refused = refused
        self._most, self._is_shared = most, is_shared
        self._num_running = Counter[str]()

    @contextmanager
    def admit(self, number: int, caller: str) -> Iterator[None]:
        """Count so many sequences of a caller. Raises ApiError if they are too many."""
        self._check(number, caller)
        self._num_running[caller] += number
        try:
            yield
        finally:
            self._num_running[caller] -= number

    def _check(self, number: int, caller: str) -> None:
        total, own = self._num_running.total(), self._num_running[caller]
        if total + number > self._most:
            reason = f"{total} sequences are under way, and {number} more than the limit of {self._most} allows"
        elif self._is_shared and own + number > self._most - total - number:
            reason = f"{own} sequences of this key are under way, and {number} more than the others' share allows"
        else:
            return
        self._refused.inc()
        raise ApiError(429, f"{reason}; try again later", retry_after_s=1)
