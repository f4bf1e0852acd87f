"""Prepares what comes next while the present is worked on."""

import queue
import threading
from collections.abc import Generator, Iterable
from typing import TypeVar

_T = TypeVar("_T")


def ahead(items: Iterable[_T]) -> Generator[_T, None, None]:
    """The items, the next of which is made by another thread as soon as one is taken; its failure is raised here.

    The thread is a daemon: an item that is still being made keeps no process from ending.
    """
    asked: queue.SimpleQueue[bool] = queue.SimpleQueue()
    made: queue.SimpleQueue[tuple[_T] | BaseException | None] = queue.SimpleQueue()

    def make() -> None:
        walk = iter(items)
        while asked.get():
            try:
                made.put((next(walk),))
            except StopIteration:
                made.put(None)
            except BaseException as failure:  # raised where the item is taken
                made.put(failure)

    threading.Thread(target=make, name="zinfer-ahead", daemon=True).start()
    try:
        asked.put(True)
        while (coming := made.get()) is not None:
            if isinstance(coming, BaseException):
                raise coming
            asked.put(True)
            yield coming[0]
    finally:
        asked.put(False)
