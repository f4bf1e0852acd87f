"""Simulated jobs: their passes are those that the job takes, kept ones are those made anew, and seconds follow."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import random_prompts, tiny_checkpoint

from zinfer import LLM, SamplingParams
from zinfer.errors import PlanError
from zinfer.planning import simulation
from zinfer.planning.job_estimator import JobEstimator, PassTimes
from zinfer.planning.kv_budget import BatchingBudget
from zinfer.planning.memory import Footprint
from zinfer.planning.simulation import PassRun, RankPasses, Simulations, in_step, passes_of, simulate, simulate_runs
from zinfer.planning.step_time import PassTime
from zinfer.scheduling.pass_order import USUAL, PassOrder
from zinfer.scheduling.schedule import PassSize
from zinfer.scheduling.sequence import Sequence as TokenSequence


@pytest.fixture(scope="module", params=["llama", "mistral"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("tokens_per_pass", "memory"), [(5, "1MB"), (64, "200kB"), (1000, "150kB")])
def test_the_passes_are_those_of_the_job(folder: Path, tokens_per_pass: int, memory: str) -> None:
    prompts = random_prompts(17, max_tokens=70, seed=tokens_per_pass)
    counts = [1 + number % 9 for number in range(len(prompts))]
    options = {"tokens_per_pass": tokens_per_pass, "kv_cache_memory": memory, "kv_page_size": 4, "max_sequences": 6}
    with LLM(folder, device="cpu", **options) as llm:
        predicted = llm.predict(list(map(len, prompts)), counts)
        params = [SamplingParams(max_new_tokens=count) for count in counts]
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
        assert predicted.num_passes == llm.stats().passes
        assert predicted.tokens_per_pass == llm.num_tokens / predicted.num_passes
        assert predicted.tokens_per_s == pytest.approx(sum(counts) / predicted.seconds)


def random_job(seed: int) -> tuple[list[int], list[int], BatchingBudget, PassOrder]:
    """Prompts, new tokens, a budget and an order of passes."""
    draw = random.Random(seed)
    num_sequences, num_pages = draw.choice([1, 2, 5, 20, 100]), draw.choice([8, 20, 60, 200, 1000])
    budget = BatchingBudget(
        tokens_per_pass=max(num_sequences, draw.choice([16, 64, 200, 1000, 10_000])),
        most_part_tokens=64,
        max_sequences=num_sequences,
        num_pages=num_pages,
        page_size=draw.choice([4, 16, 64]),
        kv_dtype=torch.float16,
        order=draw.choice(["arrival", "longest_first"]),
        lends=draw.random() < 0.5,
        footprint=Footprint(num_pages, 0, 0),
    )
    order = draw.choice([USUAL, PassOrder(draw.choice([8, 50, 300]))])
    num_tokens, longest, most_new = num_pages * budget.page_size, draw.choice([5, 60, 400]), draw.choice([1, 8, 60])
    prompts = [min(draw.randint(1, longest), num_tokens) for _ in range(draw.choice([1, 3, 20, 80]))]
    counts = [min(draw.randint(1, most_new), num_tokens - prompt + 1) for prompt in prompts]
    return prompts, counts, budget, order


@pytest.mark.parametrize("seed", range(60))
def test_counted_passes_are_those_of_the_scheduler(seed: int) -> None:
    """Of any rows and sizes; the scheduler itself is asked where some rows are wanted, here all."""
    prompts, counts, budget, order = random_job(seed)
    expected = simulate(prompts, counts, budget, order=order, wanted=range(len(prompts)))
    assert simulate(prompts, counts, budget, order=order) == expected
    few = len(expected) // 2 + 0.5
    assert simulate(prompts, counts, budget, order=order, most_passes=few) == expected[: int(few) + 1]


def test_counted_preemption_is_about_that_of_the_scheduler() -> None:
    """Every row gets its tokens, in as many passes, and about as many are computed again."""
    num_preempted = 0
    for seed in range(200):
        prompts, counts, budget, order = random_job(seed)
        exact = simulate(prompts, counts, budget, order=order)
        counted = passes_of(simulate_runs(prompts, counts, budget, order=order, is_exact=False))
        num_preempted += sum(size.num_tokens for size in exact) > sum(prompts) + sum(counts) - len(prompts)
        assert sum(size.num_samples for size in counted) == sum(counts), seed
        assert len(counted) == pytest.approx(len(exact), rel=0.01), seed
        for found, expected in zip(zip(*counted, strict=True), zip(*exact, strict=True), strict=True):
            assert sum(found) == pytest.approx(sum(expected), rel=0.02), seed
    assert num_preempted >= 5


def test_seconds_are_the_sum_of_the_passes() -> None:
    sizes = [PassSize(100, 4, 150, num_pairs=5000), PassSize(10, 10, 400), PassSize(10, 10, 410, num_lent_pages=3)]
    seen: list[tuple[int, ...]] = []
    came: list[int] = []

    def pass_time(
        num_tokens: int,
        num_rows: int,
        *,
        cache_bytes: int,
        num_pairs: int,
        num_parts: int,
        lent_bytes: int,
        hosted_bytes: int,
        is_replayed: bool,
    ) -> PassTime:
        sizes = (num_tokens, num_rows, cache_bytes, num_pairs, num_parts, lent_bytes, hosted_bytes)  # of all passes
        each = [tuple(map(int, size)) for size in zip(*np.broadcast_arrays(*sizes), strict=True)]
        seen.extend(size[:-1] for size in each)
        came.extend(size[-1] for size in each)
        return PassTime(num_tokens, 0.0, 2.0, 0.0, num_tokens / 20, cache_bytes / 1e9, 0.0)

    pages = Footprint(0, 0, 0)
    budget = BatchingBudget(100, 40, 10, 64, 16, torch.float16, "arrival", lends=True, footprint=pages)
    found = JobEstimator(budget, None, 8, pass_time).of_passes(sizes)
    assert seen == [(100, 4, 1200, 5000, 3, 0), (10, 10, 3200, 0, 1, 0), (10, 10, 3280, 0, 1, 384)]
    assert came == [0, 0, 0]
    hosted = replace(budget, footprint=Footprint(3, 0, 0, host_bytes=10 * 64 * 16 * 8))
    JobEstimator(hosted, None, 8, pass_time).of_passes(sizes)
    # What was written before the pass, and half a page a text; never more than all pages.
    assert came[3:] == [8 * (50 + 32), 8 * (390 + 80), 8 * (400 + 80)]
    JobEstimator(replace(hosted, num_pages=20), None, 8, pass_time).of_passes(sizes)
    assert came[6:] == [8 * (50 + 32), 8 * 320, 8 * 320]
    assert found.seconds == 5.0 + 2.0 + 2.0
    assert (found.num_passes, found.tokens_per_pass, found.bottleneck) == (3, 40.0, "link")
    assert found.tokens_per_s == 24 / 9
    assert str(found) == "9 s for 3 passes of 40 tokens (link), 2.7 tokens/s"


@pytest.mark.parametrize("is_hosted", [False, True])
@pytest.mark.parametrize("replayed", [None, (64, 128)])
def test_a_run_of_passes_takes_as_long_as_its_passes(*, is_hosted: bool, replayed: tuple[int, ...] | None) -> None:
    """Also where another resource is the slowest from some pass on, and where pages in host memory are all copied."""

    def pass_time(
        num_tokens: int, num_rows: int, *, cache_bytes: int, hosted_bytes: int, is_replayed: bool, **sizes: int
    ) -> PassTime:
        launch_s = 8.0 - 7.0 * is_replayed
        return PassTime(num_tokens, 0.0, hosted_bytes / 900, 0.0, num_tokens / 20, cache_bytes / 700, launch_s=launch_s)

    kv = Footprint(3, 0, 0, host_bytes=100 if is_hosted else 0)
    budget = BatchingBudget(4096, 512, 64, 40, 16, torch.float16, "arrival", lends=True, footprint=kv)
    estimator = JobEstimator(budget, None, 8, pass_time, replayed=replayed)
    runs = [PassRun(PassSize(90, 3, 150)), PassRun(PassSize(3, 3, 150), 200), PassRun(PassSize(2, 2, 500), 61)]
    found, expected = estimator.of_runs(runs), estimator.of_passes(passes_of(runs))
    assert found.seconds == pytest.approx(expected.seconds)
    assert found.busy_s == pytest.approx(expected.busy_s)
    assert replace(found, seconds=0, tokens_per_s=0, busy_s={}) == replace(
        expected, seconds=0, tokens_per_s=0, busy_s={}
    )
    assert estimator.seconds_of(RankPasses(runs, runs)) == pytest.approx(expected.seconds)


FIRST_PASS_S = 0.4
"""What a process's first pass on a GPU takes beside its launches."""


def test_passes_of_a_form_are_replayed_once_they_recur() -> None:
    """Decodes as far as they are padded to one number of rows, prompts up to the largest size that is replayed."""

    def pass_time(num_tokens: int, num_rows: int, *, is_replayed: bool, **sizes: int) -> PassTime:
        return PassTime(num_tokens, 0.0, 0.0, 0.0, 0.0, 0.0, launch_s=8.0 - 7.0 * is_replayed)

    budget = BatchingBudget(4096, 512, 4096, 64, 16, torch.float16, "arrival", lends=True, footprint=Footprint(0, 0, 0))
    decodes, mixed, large = PassSize(31, 31, 900), PassSize(200, 31, 900), PassSize(300, 31, 900)
    estimator = JobEstimator(budget, None, 8, pass_time, replayed=(64, 128, 256))
    # 8 launches, one capture, which takes as long as these, and a replay.
    for size, seconds in ((decodes, 129), (mixed, 129), (large, 80), (PassSize(300, 300, 9000), 80)):
        assert estimator.of_passes([size] * 10).seconds == seconds + FIRST_PASS_S, size
    assert estimator.of_passes([decodes, PassSize(32, 32, 900)] * 5).seconds == 129 + FIRST_PASS_S, "both are padded"
    assert replace(estimator, replayed=None).of_passes([decodes] * 10).seconds == 80 + FIRST_PASS_S


@pytest.mark.parametrize(("launch_s", "shares_host", "more_s"), [(8.0, False, 0.4), (8.0, True, 0), (0.0, False, 0)])
def test_the_first_pass_on_a_gpu_takes_longer(launch_s: float, shares_host: bool, more_s: float) -> None:
    """Alike where passes are predicted together and one by one."""

    def pass_time(num_tokens: Any, num_rows: Any, **sizes: Any) -> PassTime:
        matrix_s = num_tokens / 1000
        return PassTime(
            num_tokens, 0.0, 0.0, 0.0, matrix_s, 0.0, launch_s=launch_s + 0 * num_tokens, shares_host=shares_host
        )

    budget = BatchingBudget(4096, 512, 4096, 64, 16, torch.float16, "arrival", lends=True, footprint=Footprint(0, 0, 0))
    estimator, sizes = JobEstimator(budget, None, 8, pass_time), [PassSize(100, 9, 900)] * 3
    usual = sum(pass_time(size.num_tokens, size.num_samples).seconds for size in sizes)
    times = PassTimes(estimator)
    assert estimator.of_passes(sizes).seconds == pytest.approx(usual + more_s)
    assert sum(times.next(size).seconds for size in sizes) == pytest.approx(usual + more_s)


def test_the_passes_that_have_ended_are_counted_once() -> None:
    budget = BatchingBudget(64, 64, 64, 64, 16, torch.float16, "arrival", lends=True, footprint=Footprint(0, 0, 0))

    def pass_time(num_tokens: int, num_rows: int, **sizes: int) -> PassTime:
        return PassTime(num_tokens, num_tokens, 0.0, 0.0, 0.0, 0.0)

    times = PassTimes(JobEstimator(budget, None, 8, pass_time))
    sizes = [PassSize(10**number, 1, 1) for number in range(4)]
    assert times.ended_s(3, sizes[:3], 1) == 1
    assert times.ended_s(3, sizes[:3], 1) == 1
    assert times.ended_s(4, sizes, 3) == 111
    assert times.ended_s(5, sizes[3:] + sizes[:1], 2) == 1112, "those before were forgotten"


def test_a_text_that_the_cache_cannot_hold(tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama", tmp_path)
    message = r"9000000 prompt tokens and 1 new ones take \d+ pages"
    with LLM(folder, device="cpu", kv_cache_memory="1MB") as llm, pytest.raises(PlanError, match=message):
        llm.predict([3, 9_000_000], 1)


LIMITS = (9, 70, 10_000, 300, 1_500, 9_000, 70)


def budget_of(draw: random.Random) -> BatchingBudget:
    """A small one, in host memory or on the device."""
    num_pages = draw.randint(40, 400)
    footprint = Footprint(num_pages << 20, 0, 0, host_bytes=draw.choice([0, num_pages << 20]))
    swaps = draw.random() < 0.3
    return BatchingBudget(
        1, 1, draw.choice([3, 20, 500]), num_pages, 4, torch.float16, "arrival", True, footprint, swaps_to_disk=swaps
    )


def lengths_of(draw: random.Random) -> tuple[list[int], list[int]]:
    count = draw.randint(1, 60)
    return [draw.randint(1, 90) for _ in range(count)], [draw.randint(1, 40) for _ in range(count)]


def with_names(
    prompt_lens: list[int], new_tokens: list[int], budget: BatchingBudget, window: int | None
) -> list[PassSize]:
    """The passes of texts whose pages all have names, as those of a real job."""
    scheduler = budget.scheduler(window)
    for number, (prompt_len, count) in enumerate(zip(prompt_lens, new_tokens, strict=True)):
        scheduler.add(TokenSequence(number, (number, *[0] * (prompt_len - 1)), count))
    sizes = []
    while (coming := scheduler.schedule()) is not None:
        sizes.append(coming.size)
        scheduler.advance(coming)
    return sizes


def test_a_pass_in_step_is_as_large_as_the_largest_of_all_ranks() -> None:
    one = [PassSize(100, 4, 150), PassSize(10, 10, 400), PassSize(8, 8, 410)]
    other = [PassSize(60, 6, 100), PassSize(70, 2, 300)]
    largest = [PassSize(100, 6, 150), PassSize(70, 10, 400), PassSize(8, 8, 410)]
    assert in_step([one, other], 2) == largest
    assert in_step([one, one], 2) == one
    assert in_step([one], 1, 2.0)[0] == PassSize(200, 8, 300)
    assert in_step([one, other], 2, 4.0)[0].num_tokens == 4 * 80 + 2 * 20, "of four rows each the sums differ by half"
    assert sum(size.num_tokens for size in in_step([one, other], 4)) >= sum(size.num_tokens for size in largest)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("window", [None, 30])
def test_what_is_kept_is_what_would_be_simulated_anew(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    draw, num_anew, num_preempted = random.Random(5), 0, 0

    def counting(*args: object, **options: bool) -> list[PassRun]:
        nonlocal num_anew
        num_anew += 1
        return simulate_runs(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(simulation, "simulate_runs", counting)
    for _ in range(10):
        budget, lengths = budget_of(draw), lengths_of(draw)
        kept = Simulations(*lengths, window)
        for limit in LIMITS:
            limited = replace(budget, tokens_per_pass=limit)
            wanted = with_names(*lengths, limited, window)
            assert passes_of(kept.under(limited).together) == wanted
            num_tokens = sum(lengths[0]) + sum(lengths[1]) - len(lengths[0])
            num_preempted += sum(size.num_tokens for size in wanted) > num_tokens
        larger = replace(limited, num_pages=1000)
        assert passes_of(kept.under(larger).together) == with_names(*lengths, larger, window)
    assert 0 < num_anew < 10 * len(LIMITS) * 0.9
    assert num_preempted > 0, "texts that are computed again"
