"""Pages are found by exactly their tokens and what comes before them, are counted, and are forgotten oldest first."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zinfer.scheduling.page_pool import HOLE, PagePool
from zinfer.scheduling.sequence import Sequence


def filled(pool: PagePool, number: int, tokens: tuple[int, ...]) -> Sequence:
    """A sequence with all its tokens in pages, the whole ones published."""
    sequence = Sequence(number, tokens, 1)
    pool.find(sequence)
    num_found = len(sequence.pages)
    sequence.pages += pool.take(pool.pages_for(len(tokens)) - num_found)
    pool.publish(sequence, len(tokens) // pool.page_size)
    return sequence


def found(pool: PagePool, tokens: tuple[int, ...]) -> list[int]:
    """The pages that a sequence with these tokens begins with; none is held afterwards."""
    sequence = Sequence(0, tokens, 1)
    pool.find(sequence)
    pages = sequence.pages
    pool.release(sequence)
    return pages


@pytest.mark.parametrize(("prompt", "max_new_tokens", "named"), [((), 1, "prompt"), ((1,), 0, "max_new_tokens is 0")])
def test_a_sequence_needs_a_prompt_and_a_token_to_generate(
    prompt: tuple[int, ...], max_new_tokens: int, named: str
) -> None:
    with pytest.raises(ValueError, match=f"sequence 7.*{named}"):
        Sequence(7, prompt, max_new_tokens)


@given(num_prompt=st.integers(1, 9), num_output=st.integers(0, 9), begin=st.integers(0, 20), length=st.integers(0, 20))
def test_tokens_are_those_of_prompt_and_output(num_prompt: int, num_output: int, begin: int, length: int) -> None:
    sequence = Sequence(0, tuple(range(num_prompt)), 9, list(range(num_prompt, num_prompt + num_output)))
    assert sequence.num_tokens == num_prompt + num_output
    assert tuple(sequence.tokens(begin, begin + length)) == tuple(range(sequence.num_tokens))[begin : begin + length]


def test_whole_pages_are_found_while_held_and_afterwards() -> None:
    pool = PagePool(10, 4)
    first = filled(pool, 0, tuple(range(10)))
    assert found(pool, (*range(8), 77, 78)) == first.pages[:2]
    pages = list(first.pages)
    pool.release(first)
    assert pool.num_free == 10
    assert found(pool, (*range(8), 77, 78)) == pages[:2]
    assert pool.num_used == 0


@pytest.mark.parametrize(("num_tokens", "num_found"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (10, 2), (13, 3)])
def test_the_last_token_is_never_found(num_tokens: int, num_found: int) -> None:
    pool = PagePool(10, 4)
    filled(pool, 0, tuple(range(16)))
    assert len(found(pool, tuple(range(num_tokens)))) == num_found


def test_a_page_is_known_by_what_comes_before_it() -> None:
    pool = PagePool(10, 2)
    one = filled(pool, 0, (1, 1, 5, 5, 9))
    other = filled(pool, 1, (2, 2, 5, 5, 9))
    assert found(pool, (1, 1, 5, 5, 0)) == one.pages[:2]
    assert found(pool, (2, 2, 5, 5, 0)) == other.pages[:2]
    assert found(pool, (5, 5, 5, 5, 0)) == []


def test_tokens_whose_hashes_collide_are_told_apart() -> None:
    assert hash((-1, 0)) == hash((-2, 0))
    pool = PagePool(10, 2)
    filled(pool, 0, (-1, 0, 9))
    assert found(pool, (-2, 0, 9)) == []


def test_pages_are_forgotten_least_recently_used_first_and_ends_before_beginnings() -> None:
    pool = PagePool(6, 1)
    older, newer = filled(pool, 0, (1, 2, 3)), filled(pool, 1, (4, 5, 6))
    pool.release(newer)
    pool.release(older)
    assert found(pool, (4, 5, 6, 0)) != []  # used again, so the others are older now
    assert pool.num_free == 6
    pool.take(2)
    assert [len(found(pool, (*text, 0))) for text in ((1, 2, 3), (4, 5, 6))] == [1, 3]
    pool.take(2)
    assert [len(found(pool, (*text, 0))) for text in ((1, 2, 3), (4, 5, 6))] == [0, 2]


def test_pages_that_nobody_can_find_are_taken_first() -> None:
    pool = PagePool(4, 2)
    sequence = filled(pool, 0, (1, 1, 2, 2, 3))
    pool.release(sequence)
    pool.take(2)
    assert len(found(pool, (1, 1, 2, 2, 3))) == 2


def test_what_follows_a_forgotten_page_is_never_found_under_other_contents() -> None:
    pool = PagePool(3, 2)
    sequence = filled(pool, 0, (1, 1, 2, 2, 3))
    before = sequence.pages[0]
    pool.drop_before(sequence, 2)  # the first page is free before the second one
    other = filled(pool, 1, (5, 5))
    assert other.pages == [before]
    assert found(pool, (1, 1, 2, 2, 3)) == []
    assert found(pool, (5, 5, 2, 2, 3)) == [before]


def test_of_pages_with_the_same_tokens_one_is_found_and_what_follows_is_found_after_it() -> None:
    pool = PagePool(10, 2)
    one, twin = Sequence(0, (1, 1, 2, 2, 3), 1), Sequence(1, (1, 1, 2, 2, 3), 1)
    one.pages, twin.pages = pool.take(1), pool.take(2)
    pool.publish(one, 1)
    pool.publish(twin, 2)
    assert found(pool, (1, 1, 2, 2, 3)) == [one.pages[0], twin.pages[1]]
    pool.release(twin)
    pool.release(one)
    assert found(pool, (1, 1, 2, 2, 3)) != []
    assert pool.num_free == 10


def test_dropped_pages_become_holes_and_are_given_back_once() -> None:
    pool = PagePool(10, 4)
    sequence = filled(pool, 0, tuple(range(14)))
    last = sequence.pages[2:]
    pool.drop_before(sequence, 11)
    assert sequence.pages == [HOLE, HOLE, *last]
    assert (sequence.num_dropped, pool.num_used) == (2, 2)
    pool.drop_before(sequence, 11)
    pool.drop_before(sequence, 3)
    assert pool.num_used == 2
    pool.release(sequence)
    assert (sequence.pages, sequence.num_dropped, pool.num_free) == ([], 0, 10)


def test_a_shared_page_stays_until_its_last_user_goes() -> None:
    pool = PagePool(4, 2)
    sequences = [filled(pool, number, (1, 1, number + 5)) for number in range(3)]
    assert len({sequence.pages[0] for sequence in sequences}) == 1
    assert (pool.num_used, pool.num_free) == (4, 0)
    for number, sequence in enumerate(sequences):
        pool.release(sequence)
        assert pool.num_free == (number + 1 if number < 2 else 4)


def test_more_pages_than_are_free_are_not_given() -> None:
    pool = PagePool(3, 1)
    filled(pool, 0, (1, 2))
    with pytest.raises(AssertionError, match="2 pages wanted, 1 free"):
        pool.take(2)


def test_pages_are_given_back_once() -> None:
    pool = PagePool(3, 1)
    sequence = filled(pool, 0, (1, 2))
    copy = Sequence(1, (1, 2), 1, pages=list(sequence.pages))
    pool.release(sequence)
    with pytest.raises(AssertionError, match="given back more often"):
        pool.release(copy)


def test_a_shared_page_cannot_be_published_as_something_else() -> None:
    pool = PagePool(3, 1)
    filled(pool, 0, (1, 2))
    sharer = Sequence(1, (1, 7), 1)
    pool.find(sharer)
    other = Sequence(2, (7, 7), 1, pages=sharer.pages)
    with pytest.raises(AssertionError, match="by a sequence that shares it"):
        pool.publish(other, 1)


TEXTS = st.lists(st.integers(0, 1), min_size=1, max_size=12).map(tuple)


@given(
    page_size=st.sampled_from([1, 2, 3]),
    num_pages=st.integers(12, 20),
    steps=st.lists(st.tuples(st.integers(0, 2), TEXTS, st.none() | st.integers(1, 20)), max_size=60),
)
def test_a_found_page_holds_the_tokens_looked_for(
    page_size: int, num_pages: int, steps: list[tuple[int, tuple[int, ...], int | None]]
) -> None:
    pool = PagePool(num_pages, page_size)
    contents: dict[int, tuple[int, ...]] = {}  # by page, all tokens up to its end
    held: dict[int, Sequence] = {}
    limit = num_pages
    for slot, tokens, confined in steps:
        if slot in held:
            pool.release(held.pop(slot))
        if confined is not None and pool.num_used <= confined <= num_pages:
            limit = confined
            for source, target in pool.confine(limit).items():
                contents[target] = contents[source]
                for sequence in held.values():
                    sequence.pages = [target if page == source else page for page in sequence.pages]
        num_needed = pool.pages_for(len(tokens))
        if pool.num_free < num_needed:
            continue
        for index, page in enumerate(found(pool, tokens)):
            assert contents[page] == tokens[: (index + 1) * page_size]
        held[slot] = sequence = Sequence(slot, tokens, 1)
        pool.find(sequence)
        num_found = len(sequence.pages)
        sequence.pages += pool.take(num_needed - num_found)
        for index in range(num_found, num_needed):
            contents[sequence.pages[index]] = tokens[: (index + 1) * page_size]
        pool.publish(sequence, len(tokens) // page_size)
        used = {page for other in held.values() for page in other.pages}
        assert pool.num_used == len(used)
        assert pool.num_free == limit - len(used)
        assert all(page < limit for page in used)
