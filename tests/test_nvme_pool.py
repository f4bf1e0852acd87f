"""Threads that run calls, and end."""

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
