"""Durations as people say them."""

import pytest

from zinfer.units import duration

HOUR, DAY = 3600, 86_400


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0, "0 s"),
        (0.0456, "45.6 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1 s"),
        (9.994, "9.99 s"),
        (9.996, "10 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min"),
        (125, "2 min 5 s"),
        (3599.6, "1 h"),
        (8546, "2 h 22 min"),
        (DAY - 1, "1 day"),
        (DAY + HOUR, "1 day 1 h"),
        (9 * DAY + 23 * HOUR, "9 days 23 h"),
        (10 * DAY - 1, "10 days"),
        (9.899e6, "115 days"),
        (4e9, "46,296 days"),
    ],
)
def test_a_duration_in_units_that_suit_it(seconds: float, said: str) -> None:
    assert duration(seconds) == said
