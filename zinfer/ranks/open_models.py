"""The models of this process that ranks share. They fail with the job that opened them, also those that it opens later.

A rank that fails before it opens its model tells so by the job's connections alone: the others may open theirs after
they have heard of it, and would wait for that rank as long as for one that is silent.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Protocol
from weakref import WeakSet

from zinfer.nvme.pool import call_all
from zinfer.ranks.progress import Progress


class SharedModel(Protocol):
    """What ranks share of a model.

    Attributes:
        progress: of its passes on this rank.
    """

    progress: Progress

    def fail(self, failure: BaseException) -> None:
        """As `zinfer.offload.ranks.Ranks.fail`."""


_lock = threading.RLock()
_open: "WeakSet[SharedModel]" = WeakSet()
_failures: list[BaseException | None] = []  # of the jobs under way


def add_model(model: SharedModel) -> None:
    """Let a model fail with the others of this process; at once if a job under way has failed."""
    with _lock:
        _open.add(model)
        failure = next(filter(None, _failures), None)
    if failure is not None:
        model.fail(failure)


def remove_model(model: SharedModel) -> None:
    """Take a model out that is closed."""
    with _lock:
        _open.discard(model)


def open_models() -> list[SharedModel]:
    """Return the models that are open."""
    with _lock:
        return list(_open)


def fail_models(failure: BaseException) -> None:
    """Fail every model of this process, also while it loads, and those that the job under way opens later.

    All ranks' waits for their blocks raise. Thread-safe.
    """
    with _lock:
        _failures[:] = [each or failure for each in _failures]
        failing = list(_open)
    call_all([partial(model.fail, failure) for model in failing])


@contextmanager
def failing_together() -> Iterator[None]:
    """Run a job: what `fail_models` fails meanwhile stays failed until its end."""
    with _lock:
        _failures.append(None)
    try:
        yield
    finally:
        with _lock:
            _failures.pop()
