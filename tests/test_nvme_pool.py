"""Threads that run calls, and end."""

import threading

import pytest

from zinfer.nvme.pool import Pool


def test_calls_are_made_and_their_failures_told() -> None:
    pool = Pool(3, "calls")
    assert [pool.submit(lambda number=number: number * 2).result() for number in range(9)] == list(range(0, 18, 2))  # type: ignore[misc]
    with pytest.raises(ZeroDivisionError):
        pool.submit(lambda: 1 // 0).result()
    pool.close()
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(lambda: 1)


def test_a_thread_that_is_not_listed_keeps_no_close_waiting() -> None:
    """As where Ctrl-C strikes between a thread's start and its listing."""
    pool = Pool(3, "listed")
    threads = list(pool._threads)
    del pool._threads[1]
    closing = threading.Thread(target=pool.close, daemon=True)
    closing.start()
    closing.join(10)
    assert not closing.is_alive()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
