"""Where pages are short, one prompt is under way at most, and the background takes none that it needs."""

import pytest
from test_scheduler_workloads import Room, Row, Workload


@pytest.mark.parametrize(
    ("rows", "room", "num_sets"),
    [
        pytest.param(
            [
                Row(0, 0, 7, 0, 10, 60, 0, None, is_background=True),
                Row(0, 0, 29, 0, 6, 60, 1, None),
                Row(0, 64, 5, 0, 8, 60, 1, None, is_background=True),
                Row(0, 64, 23, 0, 7, 60, 1, None),
                Row(0, 0, 57, 0, 12, 60, 2, None),
            ],
            Room(16, 0, 10, 20, None, "arrival", None),
            1,
            id="the background makes room for the next one",
        ),
        pytest.param(
            [
                Row(0, 0, 32, 0, 7, 60, 0, None, is_background=True),
                Row(0, 64, 48, 0, 6, 60, 0, None, is_background=True),
                Row(0, 64, 22, 0, 1, 60, 1, None),
            ],
            Room(16, 10, 40, 20, None, "arrival", None),
            1,
            id="the background takes the last page",
        ),
        pytest.param(
            [
                Row(0, 0, 1, 0, 10, 9, 0, None, is_background=True),
                Row(0, 5, 1, 0, 40, 2, 0, None),
                Row(0, 33, 1, 0, 8, 1, 0, None, owner="a"),
                Row(0, 0, 1, 0, 40, 1, 0, None),
                Row(0, 16, 1, 0, 40, 1, 0, None),
                Row(0, 0, 1, 0, 40, 1, 20, None, is_background=True),
                Row(0, 0, 1, 0, 3, 1, 20, None, owner="a"),
                Row(0, 128, 1, 0, 1, 1, 20, None),
            ],
            Room(1, 95, 100, 3, None, "arrival", 16),
            2,
            id="a window frees pages of a prompt that is admitted",
        ),
    ],
)
def test_one_prompt_is_under_way_though_pages_are_short(rows: list[Row], room: Room, num_sets: int) -> None:
    """A prompt that gets too few pages for its end is followed by none that would fit what is left."""
    Workload(rows, room, num_sets=num_sets).run()
