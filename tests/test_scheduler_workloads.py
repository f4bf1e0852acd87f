"""Whatever arrives, ends, and is given up, in whatever room: every sequence says what it says alone.

``ZINFER_WORKLOADS=10000`` runs so many random ones in each test instead of sixty.
"""

import os
from collections import deque
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_engine import NUM_TOKENS_KNOWN, HostedEngine, PagedEngine, completion

from zinfer.scheduling.page_pool import PagePool
from zinfer.scheduling.pass_order import USUAL, PassOrder
from zinfer.scheduling.precedence import Precedence
from zinfer.scheduling.scheduler import Scheduler
from zinfer.scheduling.sequence import Sequence, SequenceState
from zinfer.scheduling.waiting_queue import Order

MOST_PROMPT_TOKENS = 200
NUM_WORKLOADS = int(os.environ.get("ZINFER_WORKLOADS", "20"))
FAMILIES = [tuple((place * place // (7 + family)) % NUM_TOKENS_KNOWN for place in range(200)) for family in range(3)]
"""Texts that prompts begin with."""


Coming = tuple[Sequence, int, tuple[int, ...], list[int]]
"""A sequence, its next token, and the tokens behind each of its guesses."""


@dataclass(frozen=True)
class Row:
    """A prompt of a workload: ``num_common`` tokens of a family's text, then ``num_own`` of one kind.

    end_after: new tokens after which the caller ends the text. abort_at: a pass, and whether the row is given up while
        that pass is computed or before.
    """

    family: int
    num_common: int
    num_own: int
    own: int
    max_new_tokens: int
    end_after: int
    arrives_at: int
    abort_at: tuple[int, bool] | None
    is_background: bool = False
    is_scored: bool = False
    priority: int = 0
    owner: str = ""

    @property
    def precedence(self) -> Precedence:
        return Precedence(self.is_background, self.priority, self.owner)

    @property
    def prompt(self) -> tuple[int, ...]:
        return (FAMILIES[self.family][: self.num_common] + (self.own,) * self.num_own)[:MOST_PROMPT_TOKENS]


ROWS = st.builds(
    Row,
    family=st.integers(0, len(FAMILIES) - 1),
    num_common=st.sampled_from([0, 5, 16, 33, 64, 128, 150, 199]),
    num_own=st.integers(1, 10) | st.integers(1, 70),
    own=st.integers(0, NUM_TOKENS_KNOWN - 1),
    max_new_tokens=st.integers(1, 40) | st.just(40),
    end_after=st.integers(1, 60),
    arrives_at=st.sampled_from([0, 0, 0, 1, 5, 20]),
    abort_at=st.none() | st.none() | st.none() | st.tuples(st.integers(0, 40), st.booleans()),
    is_background=st.booleans(),
    is_scored=st.sampled_from([False, False, True]),
    priority=st.integers(0, 2),
    owner=st.sampled_from(["", "a", "b"]),
)


@dataclass(frozen=True)
class Room:
    """A pool with pages for ``num_spare_tokens`` beside those that the longest sequence has to have.

    orders: most tokens of passes, in turn; empty: the budget alone limits them.
    """

    page_size: int
    num_spare_tokens: int
    token_budget: int
    max_sequences: int
    most_swapped_pages: int | None
    order: Order
    window: int | None
    orders: tuple[int, ...] = ()

    def pages_alone(self, sequence: Sequence) -> int:
        """Fewest pages that a sequence can be completed in."""
        num_computed = sequence.num_tokens + sequence.max_new_tokens - 1
        num_pages = -(-num_computed // self.page_size)
        if self.window is None:
            return num_pages
        return min(num_pages, -(-(self.window - 1) // self.page_size) + 1)


ROOMS = st.builds(
    Room,
    page_size=st.sampled_from([1, 1, 16, 16, 128]),
    num_spare_tokens=st.just(0) | st.integers(0, 400) | st.integers(100, 1500),
    token_budget=st.integers(1, 300) | st.sampled_from([1, 100, 300]),
    max_sequences=st.integers(1, 20) | st.just(20),
    most_swapped_pages=st.none() | st.just(0) | st.integers(1, 60),
    order=st.sampled_from(["arrival", "longest_first"]),
    window=st.none() | st.none() | st.sampled_from([1, 2, 16, 17, 50, 300]),
)


class Workload:
    """Rows on their way through a scheduler, whose pool is just large enough for each of them, or larger."""

    def __init__(
        self,
        rows: list[Row],
        room: Room,
        *,
        lends: bool = False,
        engine: type[PagedEngine] = PagedEngine,
        num_sets: int = 1,
        guesses: tuple[tuple[int, int], ...] = (),
    ) -> None:
        self.guesses = guesses  # right and wrong ones of passes that may have any, in turn
        self.num_accepted = self.num_refused = 0
        self.rows = sorted(rows, key=lambda row: row.arrives_at)
        self.sequences = [
            Sequence(
                number,
                row.prompt,
                row.max_new_tokens,
                num_to_score=len(row.prompt) - 1 if row.is_scored else 0,
                precedence=row.precedence,
            )
            for number, row in enumerate(self.rows)
        ]
        num_pages = (
            max(room.pages_alone(sequence) for sequence in self.sequences) + room.num_spare_tokens // room.page_size
        )
        self.scheduler = Scheduler(
            PagePool(num_pages, room.page_size),
            token_budget=room.token_budget,
            max_sequences=room.max_sequences,
            most_swapped_pages=room.most_swapped_pages,
            order=room.order,
            window=room.window,
            num_sets=num_sets,
        )
        self.engine = engine(self.scheduler, room.token_budget, room.window)
        self.engine.num_sets = num_sets
        self.most_under_way = max(1, num_sets - 1)
        self.num_added = 0
        self.aborted: set[int] = set()
        self.coming_ids: deque[list[Coming]] = deque()  # of passes under way
        self.num_together = 0
        self.compositions: list[list[tuple[int, int, int]]] = []
        self.lends, self.room = lends, room
        self.num_lent = 0

    def run(self) -> None:
        """To the end, with every check on the way."""
        at = 0
        while self._step(at) or self.num_added < len(self.rows):
            at += 1
            assert at < 20_000, "the workload does not come to an end"
        self.engine.assert_empty()
        for row, sequence in zip(self.rows, self.sequences, strict=True):
            alone = completion(row.prompt, min(row.max_new_tokens, row.end_after))
            if sequence.number in self.aborted:
                alone = alone[: len(sequence.output_ids)]
            else:
                self.engine.assert_scored(sequence)
            assert sequence.output_ids == alone

    def _step(self, at: int) -> bool:
        """A pass and what comes before and after it; False where nothing was left to do."""
        while self.num_added < len(self.rows) and self.rows[self.num_added].arrives_at <= at:
            self.scheduler.add(self.sequences[self.num_added])
            self.num_added += 1
        self._abort(at, during_pass=False)
        if self.lends:
            self._lend()
        order = self._order(at)
        self.engine.check_counts(self.sequences)
        coming = self.scheduler.schedule(order)
        is_due = len(self.coming_ids) == self.most_under_way or (coming is None and len(self.coming_ids) > 0)
        self.num_together = max(self.num_together, len(self.coming_ids) + (coming is not None))
        received = self._receive() if is_due else []
        if coming is None:
            self._end_texts(received)
            return bool(is_due)
        self.compositions.append([(chunk.sequence.number, chunk.begin, chunk.end) for chunk in coming.chunks])
        next_ids = self.engine.compute(coming)
        most, swapped_out = self.room.most_swapped_pages, self.scheduler.num_swapped_pages
        assert most is None or swapped_out <= most
        assert (swapped_out > 0) == any(sequence.state is SequenceState.SWAPPED for sequence in self.sequences)
        self._end_texts(received)
        self._abort(at, during_pass=True)
        going_on = {c.sequence.number for c in coming.chunks if c.sequence.state is SequenceState.RUNNING}
        self.scheduler.advance(coming)
        sequences = self.sequences
        behind = self.engine.behind_guesses
        self.coming_ids.append(
            [
                (sequences[number], next_ids[number], sequences[number].guesses, behind.get(number, []))
                for number in next_ids
                if number in going_on
            ]
        )
        return True

    def _order(self, at: int) -> PassOrder:
        """The order of a pass, before whose guesses the tokens of passes under way are received."""
        orders = self.room.orders
        order = PassOrder(orders[at % len(orders)]) if orders else USUAL
        has_guesses = self.guesses and self.scheduler.is_decoding
        if self.engine.num_sets == 1 and (has_guesses or any(each[2] for ids in self.coming_ids for each in ids)):
            while self.coming_ids:
                self._end_texts(self._receive())
        if not has_guesses:
            return order
        num_right, num_wrong = self.guesses[at % len(self.guesses)]
        guesses = {}
        for each in self.sequences:
            if each.state is SequenceState.RUNNING and not each.is_awaited:
                right = completion(tuple(each.tokens(0, each.num_tokens)), num_right + 1)
                guesses[each.number] = (*right[:-1], *[(right[-1] + 1) % NUM_TOKENS_KNOWN] * num_wrong)
        return order._replace(guesses=guesses)

    def _receive(self) -> list[Coming]:
        """Take the tokens of a pass, and those behind right guesses."""
        received = self.coming_ids.popleft()
        self.scheduler.receive((sequence, token_id) for sequence, token_id, *_ in received)
        for sequence, token_id, guesses, behind in received:
            end_after = self.rows[sequence.number].end_after
            for guess, following in zip(guesses, behind, strict=True):
                is_over = sequence.state is SequenceState.FINISHED or len(sequence.output_ids) >= end_after
                if is_over or guess != token_id:
                    self.num_refused += 1
                    break
                self.scheduler.accept(sequence, following)
                self.num_accepted += 1
                token_id = following
        return received

    def _lend(self) -> None:
        """Have the scheduler do without the pages that are to spare."""
        num_pages = self.engine.pool.num_pages - self.scheduler.num_spare_pages
        self.engine.move(self.scheduler.confine(num_pages))
        self.num_lent += num_pages < self.engine.pool.num_pages

    def _end_texts(self, received: list[Coming]) -> None:
        """With the tokens of an earlier pass, while the next one is computed."""
        for sequence, *_ in received:
            is_finished = sequence.state is SequenceState.FINISHED  # with all the tokens that it may have
            ended = is_finished or len(sequence.output_ids) >= self.rows[sequence.number].end_after
            if ended and not is_finished:
                self.scheduler.end(sequence)
            if ended:  # by a right guess, perhaps, after it was swapped out
                self.engine.forget(sequence)

    def _abort(self, at: int, during_pass: bool) -> None:
        for row, sequence in zip(self.rows[: self.num_added], self.sequences, strict=False):
            if row.abort_at == (at, during_pass) and sequence.state is not SequenceState.FINISHED:
                self.scheduler.end(sequence)
                self.engine.forget(sequence)
                self.aborted.add(sequence.number)


@given(rows=st.lists(ROWS, min_size=1, max_size=16), room=ROOMS)
@settings(max_examples=NUM_WORKLOADS)
def test_every_sequence_says_what_it_says_alone(rows: list[Row], room: Room) -> None:
    Workload(rows, room).run()


@given(rows=st.lists(ROWS, min_size=1, max_size=16), room=ROOMS)
@settings(max_examples=NUM_WORKLOADS)
def test_pages_that_are_lent_are_not_missed(rows: list[Row], room: Room) -> None:
    rows = [replace(row, arrives_at=0) for row in rows]
    plain, lending = Workload(rows, room), Workload(rows, room, lends=True)
    plain.run()
    lending.run()
    assert lending.compositions == plain.compositions


@given(rows=st.lists(ROWS, min_size=1, max_size=16), room=ROOMS, most_gap=st.integers(0, 6))
@settings(max_examples=NUM_WORKLOADS)
def test_pages_that_a_pass_needs_come_and_those_that_it_writes_go_back(
    rows: list[Row], room: Room, most_gap: int
) -> None:
    """To and from memory elsewhere: the engine computes on those alone that were brought for the pass."""

    class Gaps(HostedEngine):
        pass

    Gaps.most_gap = most_gap
    Workload(rows, room, engine=Gaps).run()


@given(rows=st.lists(ROWS, min_size=1, max_size=16), room=ROOMS, num_sets=st.integers(2, 4))
@settings(max_examples=NUM_WORKLOADS)
def test_passes_of_several_sets_are_under_way_at_once(rows: list[Row], room: Room, num_sets: int) -> None:
    Workload(rows, room, num_sets=num_sets).run()


@pytest.mark.parametrize("most_swapped_pages", [None, 0])
def test_others_wait_for_no_more_than_the_pass_under_way(most_swapped_pages: int | None) -> None:
    """However the background fills rows, pages and tokens: what arrives is in the next pass, and goes on in each."""
    background = [Row(number % 3, 100, 20, number, 40, 60, 0, None, is_background=True) for number in range(30)]
    arriving = [Row(0, 0, 60, 20 + number, 10, 60, at, None) for number, at in enumerate((3, 9, 9, 9, 30))]
    for room in (
        Room(16, 200, 300, 20, most_swapped_pages, "arrival", None),  # pages are short
        Room(16, 9000, 300, 8, most_swapped_pages, "arrival", None),  # rows
        Room(16, 9000, 200, 30, most_swapped_pages, "longest_first", None),  # tokens
    ):
        workload = Workload([*background, *arriving], room)
        workload.run()
        for sequence, row in zip(workload.sequences, workload.rows, strict=True):
            if not row.is_background:
                passes = [at for at, chunks in enumerate(workload.compositions) if sequence.number in dict_of(chunks)]
                assert passes == list(range(row.arrives_at, row.arrives_at + 10)), room
        assert workload.engine.num_swapped_out + workload.engine.num_recomputed > 0 or room.token_budget == 200


@pytest.mark.parametrize("smaller", [20, 15])
def test_nobody_is_preempted_for_a_smaller_pass(smaller: int) -> None:
    """More of the background run than passes with others have room for: they wait where they are, or go on beside."""
    background = [Row(number % 3, 0, 10, number, 40, 60, 0, None, is_background=True) for number in range(18)]
    arriving = Row(0, 0, 12, 20, 10, 60, 6, None)
    orders = (200,) * 6 + (smaller,) * 60
    workload = Workload([*background, arriving], Room(16, 9000, 200, 20, None, "arrival", None, orders))
    workload.run()
    assert workload.engine.num_swapped_out + workload.engine.num_recomputed == 0
    arrived = next(each.number for each, row in zip(workload.sequences, workload.rows, strict=True) if row == arriving)
    assert [at for at, chunks in enumerate(workload.compositions) if arrived in dict_of(chunks)] == [*range(6, 16)]
    num_tokens = [sum(end - begin for _, begin, end in chunks) for chunks in workload.compositions[6:16]]
    assert num_tokens == [smaller, *[min(smaller, 19)] * 9]


def dict_of(chunks: list[tuple[int, int, int]]) -> dict[int, tuple[int, int]]:
    return {number: (begin, end) for number, begin, end in chunks}


@pytest.mark.parametrize("ends", [(1, -1, -2, 3, 1, 1), (1, 1, 1, 2, -3)], ids=["a pass without chunks", "a prefix"])
def test_two_sets_make_room_for_a_prompt(ends: tuple[int, ...]) -> None:
    """All pages are for a prompt that arrives while texts of one token run, some of them (negative) in the background.

    Once the pass that swaps a text out has no chunks; once the pages of a shared prefix make the rest too few.
    """
    texts = [Row(0, 0, 1, 0, 40, abs(end), 0, None, is_background=end < 0) for end in ends]
    workload = Workload(
        [*texts, Row(0, 128, 1, 0, 1, 1, 5, None)], Room(1, 0, 125, 20, None, "arrival", None), num_sets=2
    )
    workload.run()
    assert workload.engine.num_swapped_out > 0


@pytest.mark.parametrize("num_sets", [2, 3, 4])
def test_sets_share_the_sequences_evenly(num_sets: int) -> None:
    """Rows that arrive at once are spread over the sets, and stay so while they generate."""
    rows = [Row(0, 0, 5, number % 3, 40, 60, 0, None) for number in range(12)]
    workload = Workload(rows, Room(16, 1500, 300, 20, None, "arrival", None), num_sets=num_sets)
    workload.run()
    assert workload.num_together == num_sets or num_sets == 2, "the oldest is received as the next is computed"
    sizes = [len(each) for each in workload.compositions[: 30 * num_sets]]
    assert sizes == [12 // num_sets] * len(sizes)


def test_pages_are_lent_as_a_workload_ends() -> None:
    rows = [Row(0, 0, 64, number % 3, 40, 60, 0, None) for number in range(12)]
    workload = Workload(rows, Room(16, 1500, 300, 20, None, "arrival", None), lends=True)
    workload.run()
    assert workload.num_lent > 20


@pytest.mark.parametrize("most_swapped_pages", [None, 0, 12])
@pytest.mark.parametrize("window", [None, 50])
def test_the_workloads_share_pages_and_run_short_of_them(most_swapped_pages: int | None, window: int | None) -> None:
    rows = [Row(number // 8, 64, 1 + number % 7, number % 2, 40, 60, 0, None) for number in range(24)]
    workload = Workload(rows, Room(16, 150, 300, 20, most_swapped_pages, "arrival", window))
    workload.run()
    engine = workload.engine
    assert engine.num_shared > 0
    assert (engine.num_swapped_out > 0) == (most_swapped_pages != 0)
    assert (engine.num_recomputed > 0) == (most_swapped_pages is not None)
    assert engine.num_swapped_in == engine.num_swapped_out
