"""What a pass is composed of, who makes room for whom, and what is refused."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paged_engine import PagedEngine, completion

from zinfer.errors import PlanError
from zinfer.scheduling.page_allocator import check_pages, max_tokens_alone
from zinfer.scheduling.page_pool import HOLE, PagePool
from zinfer.scheduling.schedule import Pass
from zinfer.scheduling.scheduler import Scheduler
from zinfer.scheduling.sequence import Sequence, SequenceState

LONG = tuple(place * place % 3 for place in range(100))


def scheduler_of(num_pages: int, page_size: int, **settings: Any) -> Scheduler:
    return Scheduler(PagePool(num_pages, page_size), **{"token_budget": 100, "max_sequences": 100, **settings})


def add(scheduler: Scheduler, number: int, num_prompt: int, max_new_tokens: int = 8, salt: int = 0) -> Sequence:
    """Prompts whose numbers differ share nothing, unless they are salted alike."""
    first_token = (salt or number + 1) * 1000
    sequence = Sequence(number, tuple(range(first_token, first_token + num_prompt)), max_new_tokens)
    scheduler.add(sequence)
    return sequence


def step(scheduler: Scheduler) -> Pass:
    """A pass in which every next token is 7."""
    coming = scheduler.schedule()
    assert coming is not None
    finish(scheduler, coming)
    return coming


def finish(scheduler: Scheduler, coming: Pass) -> None:
    scheduler.advance(coming)
    scheduler.receive([(chunk.sequence, 7) for chunk in coming.chunks if chunk.samples])


def composition(coming: Pass) -> list[tuple[int, int, int]]:
    return [(chunk.sequence.number, chunk.begin, chunk.end) for chunk in coming.chunks]


def test_a_pass_has_decodes_then_the_prompt_under_way_then_new_prompts() -> None:
    scheduler = scheduler_of(100, 16, token_budget=10)
    for number, num_prompt in enumerate((4, 17, 3, 50)):
        add(scheduler, number, num_prompt)
    assert composition(step(scheduler)) == [(0, 0, 4), (1, 0, 6)]
    assert composition(step(scheduler)) == [(0, 4, 5), (1, 6, 15)]
    last = step(scheduler)
    assert composition(last) == [(0, 5, 6), (1, 15, 17), (2, 0, 3), (3, 0, 4)]
    assert [chunk.samples for chunk in last.chunks] == [True, True, True, False]
    assert composition(step(scheduler)) == [(0, 6, 7), (1, 17, 18), (2, 3, 4), (3, 4, 11)]


def test_a_sequence_ends_with_its_last_new_token_or_when_the_caller_says_so() -> None:
    scheduler = scheduler_of(10, 4)
    first, second = add(scheduler, 0, 3, max_new_tokens=2), add(scheduler, 1, 3, max_new_tokens=37)
    step(scheduler)
    step(scheduler)
    assert (first.state, first.output_ids) == (SequenceState.FINISHED, [7, 7])
    scheduler.end(second)
    assert scheduler.schedule() is None
    assert scheduler.pool.num_used == 0


def test_no_more_run_than_there_may() -> None:
    scheduler = scheduler_of(100, 16, max_sequences=2)
    for number in range(3):
        add(scheduler, number, 3, max_new_tokens=2)
    assert [len(step(scheduler).chunks) for _ in range(4)] == [2, 2, 1, 1]


def test_a_prompt_is_admitted_when_its_first_chunk_fits_and_leaves_a_page_to_each_decode() -> None:
    scheduler = scheduler_of(32, 4, token_budget=200)
    add(scheduler, 0, 60, max_new_tokens=6)
    add(scheduler, 1, 64)
    assert composition(step(scheduler)) == [(0, 0, 60), (1, 0, 64)]
    assert scheduler.pool.num_free == 1


def test_a_prompt_waits_where_it_would_leave_no_page_to_a_decode() -> None:
    scheduler = scheduler_of(32, 4, token_budget=200)
    add(scheduler, 0, 60, max_new_tokens=6)
    add(scheduler, 1, 68)
    add(scheduler, 2, 1)
    for _ in range(6):
        assert [number for number, *_ in composition(step(scheduler))] == [0]
    assert composition(step(scheduler)) == [(1, 0, 68), (2, 0, 1)]


def test_the_last_admitted_is_parked_when_a_decode_needs_its_page_and_comes_back_as_it_was() -> None:
    scheduler = scheduler_of(4, 4)
    first, second = add(scheduler, 0, 7, max_new_tokens=6), add(scheduler, 1, 8, max_new_tokens=8)
    assert composition(step(scheduler)) == [(0, 0, 7), (1, 0, 8)]
    lying = tuple(second.pages)
    assert composition(step(scheduler)) == [(0, 7, 8)]  # no page is left for the second one, which waits in its place
    assert second.state is SequenceState.RUNNING
    coming = step(scheduler)
    assert composition(coming) == [(0, 8, 9)]
    assert coming.swapped_out == [(second, lying)]
    assert (second.state, second.pages, second.num_computed) == (SequenceState.SWAPPED, [], 8)
    while first.state is not SequenceState.FINISHED:
        assert composition(step(scheduler))[0][0] == 0
    coming = step(scheduler)
    assert [sequence for sequence, _ in coming.swapped_in] == [second]
    assert composition(coming) == [(1, 8, 9)]


def test_pages_that_are_still_there_are_not_copied_back() -> None:
    scheduler = scheduler_of(6, 4)
    keeper = add(scheduler, 0, 7, max_new_tokens=14, salt=9)
    guest = add(scheduler, 1, 11, max_new_tokens=8, salt=9)
    step(scheduler)
    assert guest.pages[0] == keeper.pages[0]
    swapped_out: list[tuple[int, ...]] = []
    while not swapped_out:
        swapped_out = [pages for _, pages in step(scheduler).swapped_out]
    swapped_in: list[tuple[int, ...]] = []
    while not swapped_in:
        swapped_in = [pages for _, pages in step(scheduler).swapped_in]
    assert swapped_out[0][0] == guest.pages[0]
    assert 0 < len(swapped_in[0]) < len(swapped_out[0])
    assert list(swapped_in[0]) == guest.pages[len(swapped_out[0]) - len(swapped_in[0]) : len(swapped_out[0])]


def test_more_of_a_parked_prompt_may_be_found_than_was_parked() -> None:
    scheduler = scheduler_of(4, 4, token_budget=15)
    first, second = add(scheduler, 0, 7, max_new_tokens=6), add(scheduler, 1, 15, max_new_tokens=2)
    while second.state is not SequenceState.SWAPPED:
        step(scheduler)
    assert second.num_computed == 8
    scheduler.end(first)
    other = Sequence(2, second.prompt_ids, 1)  # computes more of the same text
    scheduler.pool.find(other)
    other.pages += scheduler.pool.take(2)
    scheduler.pool.publish(other, len(other.pages))
    scheduler.pool.release(other)
    coming = step(scheduler)
    assert coming.swapped_in == [(second, ())]
    assert composition(coming) == [(1, 12, 15)]


def test_to_recompute_is_to_wait_in_front_and_to_compute_what_cannot_be_found() -> None:
    scheduler = scheduler_of(4, 4, most_swapped_pages=0)
    first, second = add(scheduler, 0, 7, max_new_tokens=6), add(scheduler, 1, 8, max_new_tokens=8)
    add(scheduler, 2, 1)
    step(scheduler)
    step(scheduler)
    coming = step(scheduler)
    assert not coming.swapped_out
    assert (second.state, second.pages, second.output_ids) == (SequenceState.WAITING, [], [7])
    while first.state is not SequenceState.FINISHED:
        step(scheduler)
    assert composition(step(scheduler))[0] == (1, 4, 9)  # its first page was still there
    assert second.output_ids == [7, 7]


def test_fifty_prompts_with_one_beginning_compute_it_once_in_one_pass() -> None:
    scheduler = scheduler_of(200, 16, token_budget=1000)
    system = tuple(range(160))
    for number in range(50):
        scheduler.add(Sequence(number, (*system, 1000 + number), 4))
    coming = step(scheduler)
    assert composition(coming) == [(0, 0, 161), *((number, 160, 161) for number in range(1, 50))]
    assert scheduler.pool.num_used == 10 + 50


def test_pages_that_chunks_fill_together_are_found() -> None:
    scheduler = scheduler_of(20, 4, token_budget=10)
    add(scheduler, 0, 18, salt=9)
    step(scheduler)
    add(scheduler, 1, 18, salt=9)
    assert composition(step(scheduler)) == [(0, 10, 18), (1, 16, 18)]


def test_pages_behind_the_window_are_given_back() -> None:
    pool = PagePool(6, 4)
    scheduler = Scheduler(pool, token_budget=16, max_sequences=4, window=8)
    engine = PagedEngine(scheduler, 16, window=8)
    sequence = Sequence(0, LONG, 30)  # 33 pages if they were kept
    scheduler.add(sequence)
    while (coming := scheduler.schedule()) is not None:
        next_ids = engine.compute(coming)
        scheduler.advance(coming)
        scheduler.receive((sequence, token_id) for token_id in next_ids.values())
        engine.check_counts([sequence])
        assert pool.num_used <= 3
        if sequence.pages:
            needed = max(sequence.num_computed - 8 + 1, 0) // 4
            assert [page == HOLE for page in sequence.pages] == [i < needed for i in range(len(sequence.pages))]
    assert sequence.output_ids == completion(LONG, 30)


def test_the_longest_prompt_is_admitted_first_and_ties_go_by_arrival() -> None:
    scheduler = scheduler_of(100, 16, order="longest_first", token_budget=1000)
    for number, num_prompt in enumerate((5, 50, 20, 50)):
        add(scheduler, number, num_prompt)
    assert [number for number, *_ in composition(step(scheduler))] == [1, 3, 2, 0]


def test_a_short_prompt_is_overtaken_only_by_those_that_waited_with_it() -> None:
    scheduler = scheduler_of(100, 16, order="longest_first", max_sequences=1)
    add(scheduler, 0, 1, max_new_tokens=1)
    add(scheduler, 1, 20, max_new_tokens=1)
    admitted = []
    for number in range(2, 8):
        admitted += [number for number, *_ in composition(step(scheduler))]
        add(scheduler, number, 20 + number, max_new_tokens=1)
    assert admitted == [1, 0, 3, 2, 5, 4]


def test_what_could_never_fit_is_refused_with_the_remedy() -> None:
    scheduler = scheduler_of(4, 16)
    add(scheduler, 0, 60, max_new_tokens=5)  # the last new token is never computed: 64
    with pytest.raises(PlanError, match=r"^60 prompt tokens and 6 new ones take 5 pages .* has 4; shorten"):
        add(scheduler, 1, 60, max_new_tokens=6)
    add(scheduler, 2, 3)
    assert composition(step(scheduler)) == [(0, 0, 60)]


@given(
    num_pages=st.integers(1, 6),
    page_size=st.sampled_from([1, 4, 16]),
    num_prompt=st.integers(1, 60),
    max_new_tokens=st.integers(1, 40),
    window=st.none() | st.integers(1, 50),
)
def test_whoever_asks_whether_a_sequence_fits_gets_one_answer(
    num_pages: int, page_size: int, num_prompt: int, max_new_tokens: int, window: int | None
) -> None:
    """The scheduler that runs it, plans, and the server's limit of lengths."""
    scheduler = scheduler_of(num_pages, page_size, window=window)
    if scheduler.fits(num_prompt, max_new_tokens):
        check_pages(num_prompt, max_new_tokens, num_pages, page_size, window)
        add(scheduler, 0, num_prompt, max_new_tokens)
        while (coming := scheduler.schedule()) is not None:
            finish(scheduler, coming)
        assert scheduler.num_running == 0
    else:
        with pytest.raises(PlanError):
            check_pages(num_prompt, max_new_tokens, num_pages, page_size, window)
        with pytest.raises(PlanError):
            add(scheduler, 0, num_prompt, max_new_tokens)
    if window is None:
        is_short = num_prompt + max_new_tokens <= max_tokens_alone(num_pages, page_size)
        assert scheduler.fits(num_prompt, max_new_tokens) == is_short


@pytest.mark.parametrize(("window", "num_pages"), [(1, 1), (2, 2), (5, 2), (6, 3), (8, 3), (1000, 25)])
def test_a_window_may_begin_at_the_last_token_of_a_page(window: int, num_pages: int) -> None:
    add(scheduler_of(num_pages, 4, window=window), 0, 90, max_new_tokens=10)
    if num_pages > 1:
        with pytest.raises(PlanError, match=f"take {num_pages} pages"):
            add(scheduler_of(num_pages - 1, 4, window=window), 0, 90, max_new_tokens=10)


@pytest.mark.parametrize("state", ["waiting", "running", "in a pass", "parked", "to recompute"])
def test_any_unfinished_sequence_can_be_given_up(state: str) -> None:
    scheduler = scheduler_of(4, 4, most_swapped_pages=0 if state == "to recompute" else None)
    first = add(scheduler, 0, 7, max_new_tokens=6)
    second = add(scheduler, 1, 8)
    if state in ("running", "parked", "to recompute"):
        step(scheduler)
    if state in ("parked", "to recompute"):
        step(scheduler)
        step(scheduler)
    coming = scheduler.schedule() if state == "in a pass" else None
    scheduler.end(second)
    if coming is not None:
        scheduler.advance(coming)
        scheduler.receive([(first, 7)])
    assert (second.state, second.pages) == (SequenceState.FINISHED, [])
    while scheduler.num_running or first.state is SequenceState.WAITING:
        assert composition(step(scheduler))[0][0] == 0
    assert scheduler.schedule() is None
    assert scheduler.pool.num_used == 0
    with pytest.raises(AssertionError, match="sequence 1 is FINISHED"):
        scheduler.end(second)


def test_calls_that_make_no_sense_are_assertions() -> None:
    scheduler = scheduler_of(4, 4)
    sequence = add(scheduler, 3, 2)
    with pytest.raises(AssertionError, match="sequence 3 after 3"):
        scheduler.add(Sequence(3, (1,), 1))
    coming = scheduler.schedule()
    assert coming is not None
    with pytest.raises(AssertionError, match="not followed by advance"):
        scheduler.schedule()
    with pytest.raises(AssertionError, match="has its pages"):
        scheduler.confine(4)
    with pytest.raises(AssertionError, match="scheduled last"):
        scheduler.advance(Pass())
    scheduler.advance(coming)
    scheduler.receive([(sequence, 7)])
    with pytest.raises(AssertionError, match="has all its tokens"):
        scheduler.receive([(sequence, 7)])
    with pytest.raises(AssertionError, match="scheduled last"):
        scheduler.advance(coming)
