"""Prepares what comes next while the present is worked on."""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_T = TypeVar("_T")


def ahead(items: Iterable[_T]) -> Iterator[_T]:
    """The items, the next of which is made by another thread as soon as one is taken; its failure is raised here."""
    walk = iter(items)
    pool = ThreadPoolExecutor(1, thread_name_prefix="zinfer-ahead")
    try:
        coming = pool.submit(next, walk, None)
        while (item := coming.result()) is not None:
            coming = pool.submit(next, walk, None)
            yield item
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
