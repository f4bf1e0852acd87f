"""Pages that a pass moves: those that it reads and did not begin, those that it writes, and gaps that are right."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zinfer.kv_cache.transfers import PageTraffic, find_traffic
from zinfer.scheduling.page_pool import HOLE
from zinfer.scheduling.schedule import Chunk
from zinfer.scheduling.sequence import Sequence


def chunk(begin: int, end: int, pages: list[int], num_dropped: int = 0) -> Chunk:
    sequence = Sequence(0, (5,) * end, 1, pages=pages, num_dropped=num_dropped)
    return Chunk(sequence, begin, end, True)


def pages_of(runs: tuple[slice, ...]) -> list[int]:
    return [page for run in runs for page in range(run.start, run.stop)]


@pytest.mark.parametrize(
    ("chunks", "window", "coming", "going"),
    [
        ([chunk(0, 9, [2, 3, 4])], None, [], [2, 3, 4]),  # a prompt from its first token on
        ([chunk(9, 10, [2, 3, 4])], None, [2, 3, 4], [4]),  # a decode in the middle of a page
        ([chunk(8, 9, [2, 3, 4])], None, [2, 3], [4]),  # one that begins a page
        ([chunk(6, 11, [7, 9, 1])], None, [7, 9], [1, 9]),  # a chunk of a prompt under way
        ([chunk(0, 8, [0, 1]), chunk(8, 9, [0, 1, 5])], None, [], [0, 1, 5]),  # shared as it is written
        ([chunk(9, 10, [3, 2, 4]), chunk(8, 9, [3, 2, 6])], None, [2, 3, 4], [4, 6]),
        ([chunk(17, 18, [HOLE, HOLE, 2, 8, 6], 2)], None, [2, 6, 8], [6]),
        ([chunk(17, 18, [0, 1, 2, 8, 6])], 3, [6, 8], [6]),  # positions 15 to 17
        ([chunk(17, 18, [0, 1, 2, 8, 6])], 1, [6], [6]),
        ([chunk(16, 18, [0, 1, 2, 8, 6])], 1, [], [6]),
    ],
)
def test_pages_of_passes(chunks: list[Chunk], window: int | None, coming: list[int], going: list[int]) -> None:
    found = find_traffic(chunks, 10, 4, 0, window)
    assert pages_of(found.coming) == coming
    assert pages_of(found.going) == going


def test_gaps_come_along_and_go_back_only_as_they_came() -> None:
    texts = [chunk(9, 10, [0, 1, 4]), chunk(0, 2, [6]), chunk(0, 2, [8]), chunk(5, 6, [14, 15])]
    assert find_traffic(texts, 20, 4, 0) == PageTraffic(
        (slice(0, 2), slice(4, 5), slice(14, 16)), (slice(4, 5), slice(6, 7), slice(8, 9), slice(15, 16))
    )
    # 2 and 3 come along; 5 and 7 did not come, so that they do not go either.
    assert find_traffic(texts, 20, 4, 2) == PageTraffic(
        (slice(0, 5), slice(14, 16)), (slice(4, 5), slice(6, 7), slice(8, 9), slice(15, 16))
    )
    assert find_traffic(texts, 20, 4, 9) == PageTraffic((slice(0, 16),), (slice(4, 16),))


@given(
    held=st.lists(st.booleans(), min_size=1, max_size=40),
    most_gap=st.integers(0, 9),
    data=st.data(),
)
def test_runs_are_disjoint_and_cut_where_they_have_to_be(held: list[bool], most_gap: int, data: st.DataObject) -> None:
    """Each page is a text of its own, with a token in it or about to be."""
    chunks = []
    for page, is_held in enumerate(held):
        if is_held:
            begin = data.draw(st.sampled_from([0, 1]))
            chunks.append(chunk(begin, begin + 1, [page]))
    read = {each.sequence.pages[0] for each in chunks if each.begin}
    written = {each.sequence.pages[0] for each in chunks}
    found = find_traffic(chunks, len(held), 4, most_gap)
    assert read <= set(pages_of(found.coming))
    assert written <= set(pages_of(found.going)) <= written | set(pages_of(found.coming))
    for runs, wanted in ((found.coming, read), (found.going, written)):
        assert all(run.start in wanted and run.stop - 1 in wanted for run in runs), "ends that nobody asked for"
        assert all(left.stop < right.start for left, right in itertools.pairwise(runs))
        for left, right in itertools.pairwise(runs):
            gap = set(range(left.stop, right.start))
            assert len(gap) > most_gap or (runs is found.going and gap - set(pages_of(found.coming)))
