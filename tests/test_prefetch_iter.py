"""Items that another thread makes one ahead."""

import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from zinfer.jobs.prompts import prefetch_iter


def test_all_items_come_in_order_one_ahead_and_no_more() -> None:
    made: list[int] = []

    def items() -> Iterator[int]:
        for number in range(5):
            made.append(number)
            yield number

    with closing(prefetch_iter(items())) as walk:
        assert next(walk) == 0
        deadline_s = time.monotonic() + 10
        while len(made) < 2 and time.monotonic() < deadline_s:
            time.sleep(0.001)
        time.sleep(0.02)
        assert made == [0, 1]
        assert list(walk) == [1, 2, 3, 4]


def test_a_failure_is_raised_where_its_item_is_taken() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise KeyError("gone")

    walk = prefetch_iter(items())
    assert next(walk) == 1
    with pytest.raises(KeyError, match="gone"):
        next(walk)


def test_leaving_early_waits_for_nothing_and_ends_the_thread() -> None:
    goes_on = threading.Event()

    def items() -> Iterator[int]:
        yield 1
        goes_on.wait(30)
        yield 2

    with closing(prefetch_iter(items())) as walk:
        next(walk)
        thread = next(each for each in threading.enumerate() if each.name == "zinfer-prefetch-iter")
    assert thread.daemon
    assert thread.is_alive()
    goes_on.set()
    thread.join(10)
    assert not thread.is_alive()
