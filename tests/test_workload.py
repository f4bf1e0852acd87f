"""Prompts begin at the pace at which texts end: no pass between carries decodes alone, and pages stay in use."""

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zinfer.scheduling.page_pool import PagePool
from zinfer.scheduling.schedule import PassSize
from zinfer.scheduling.scheduler import Scheduler
from zinfer.scheduling.sequence import Sequence
from zinfer.scheduling.workload import _LEAST_PACE, Workload


def passes(num_texts: int, num_prompt: int, num_new: int, num_pages: int, token_budget: int) -> list[PassSize]:
    """Of texts that share nothing, in pages of 64 tokens."""
    scheduler = Scheduler(PagePool(num_pages, 64), token_budget=token_budget, max_sequences=100_000)
    for number in range(num_texts):
        scheduler.add(Sequence(number, (number, *[0] * (num_prompt - 1)), num_new))
    sizes = []
    while (coming := scheduler.schedule()) is not None:
        sizes.append(coming.size)
        scheduler.advance(coming)
    return sizes


def test_texts_that_fit_by_the_hundred_end_a_few_in_every_pass() -> None:
    num_texts, num_new = 1500, 32
    sizes = passes(num_texts, 512, num_new, 5600, 65_536)
    # Texts take nine pages, and a page in 16 is left to decodes: 583 at once, of which 18.2 end in a pass.
    until_last_began = sizes[: len(sizes) - num_new]
    assert max(size.num_tokens for size in sizes) <= 584 * (512 / 32 + 1)
    assert sum(size.num_tokens < 8000 for size in until_last_began[:-1]) <= 1
    assert len(sizes) == pytest.approx(num_texts / (583 / 32) + num_new, rel=0.05)


def test_a_pass_may_always_carry_what_the_link_hides() -> None:
    sizes = passes(40, 512, 500, 500, 65_536)
    assert sizes[0].num_tokens == _LEAST_PACE
    assert next(iter(passes(40, 512, 500, 500, 1000))).num_tokens == 1000


def test_texts_that_fit_at_once_begin_at_once() -> None:
    sizes = passes(580, 512, 32, 5600, 10**6)
    assert sizes[0].num_tokens == 580 * 512
    assert len(sizes) == 32
    assert len(passes(580, 512, 32, 5600, 131_072)) == 32 + 580 * 512 // 131_072
    assert sizes[0].num_tokens > 3 * passes(700, 512, 32, 5600, 10**6)[0].num_tokens


def test_equal_beginnings_are_needed_once() -> None:
    demand = Workload(4)
    texts = [
        (1, 2, 3, 4, 5, 6, 7, 8, 9),
        (1, 2, 3, 4, 5, 6, 7, 8),
        (1, 2, 3, 4, 0, 0, 0, 0, 0),
        (2, 2, 3, 4, 5, 6, 7, 8, 9),
    ]
    sequences = [Sequence(number, text, 4) for number, text in enumerate(texts)]
    alone = Sequence(9, texts[0], 4, shares=False)
    for sequence in [*sequences, alone]:
        demand.add(sequence, 3)
    # The second text's own last token is computed anew, and so is its second page; the last shares nothing at all.
    assert demand.num_pages == 15 - 2
    assert demand.pace(13, 5) == sum(map(len, texts)) + 9 - 2 * 4 + 5 * 4
    demand.remove(sequences[0], 3)
    assert demand.num_pages == 12 - 1
    demand.remove(sequences[2], 3)
    assert demand.num_pages == 9
    apart = Workload(4, shares=False)
    for sequence in sequences:
        apart.add(sequence, 3)
    assert apart.num_pages == 12


def test_texts_that_begin_alike_fit_at_once_where_their_own_pages_do() -> None:
    """600 texts of 9 pages, 7 of them shared, in a pool of 2,000."""

    def first_pass(shares: bool) -> PassSize:
        scheduler = Scheduler(PagePool(2000, 64), token_budget=10**6, max_sequences=1000)
        for number in range(600):
            scheduler.add(Sequence(number, (0,) * 448 + (number,) * 64, 32, shares=shares))
        coming = scheduler.schedule()
        assert coming is not None
        return coming.size

    assert first_pass(True).num_tokens == 448 + 600 * 64
    assert first_pass(False).num_tokens == _LEAST_PACE


@given(
    texts=st.lists(st.tuples(st.integers(1, 9000), st.integers(1, 2000)), max_size=30),
    num_pages=st.integers(1, 10**5),
    max_sequences=st.integers(1, 10**4),
    data=st.data(),
)
def test_what_is_counted_no_more_leaves_no_trace(
    texts: list[tuple[int, int]], num_pages: int, max_sequences: int, data: st.DataObject
) -> None:
    sequences = [Sequence(number, (0,) * num_prompt, num_new) for number, (num_prompt, num_new) in enumerate(texts)]
    gone = data.draw(st.sets(st.sampled_from(range(len(texts))))) if texts else set()
    demand, fresh = Workload(64), Workload(64)
    for sequence in sequences:
        demand.add(sequence, 1 + sequence.num_tokens // 64)
        if sequence.number not in gone:
            fresh.add(sequence, 1 + sequence.num_tokens // 64)
    for number in gone:
        demand.remove(sequences[number], 1 + sequences[number].num_tokens // 64)
    assert demand.num_pages == fresh.num_pages
    assert demand.pace(num_pages, max_sequences) == fresh.pace(num_pages, max_sequences)


def test_pages_that_are_found_no_more_are_needed_beside_those_of_texts_that_begin_alike() -> None:
    """What is to spare can be lent, so nobody may hold it."""
    scheduler = Scheduler(PagePool(40, 4), token_budget=100, max_sequences=9)
    texts = [Sequence(number, (1,) * 17, 4) for number in range(4)]

    def compute(broken: Sequence | None = None) -> None:
        coming = scheduler.schedule()
        assert coming is not None
        scheduler.advance(coming)
        scheduler.receive((chunk.sequence, 3) for chunk in coming.chunks if chunk.sequence is not broken)

    for text in texts[:2]:
        scheduler.add(text)
    assert scheduler.num_wanted_pages == 5 + 5 - 4
    compute(broken=texts[1])
    scheduler.restart(texts[1])
    scheduler.forget()
    for text in texts[2:]:
        scheduler.add(text)
    compute()
    assert scheduler.pool.num_used == scheduler.num_wanted_pages == 5 + 5 + (5 + 5 - 4)
    scheduler.confine(scheduler.pool.num_pages - scheduler.num_spare_pages)
    for text in texts:
        scheduler.end(text)
    assert scheduler.num_wanted_pages == 0


def test_shared_prefixes_are_the_same_in_every_process() -> None:
    program = (
        "from array import array; from zinfer.scheduling.workload import SharedPrefixCounter as Counter;"
        "print([page.hex() for page in Counter(4)._hashes(array('i', range(20)))])"
    )
    said = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert said[0] == said[1]
    assert len(set(said[0].split())) == 4
