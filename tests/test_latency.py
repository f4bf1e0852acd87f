"""Passes that keep to a time between tokens: what they may compute, how that is learnt, and what is said of it."""

import asyncio
import logging
import random
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from llm_support import NUM_NEW, alone, by_ids, folder, prompts
from paged_engine import completion
from test_scheduler_workloads import ROWS, Room, Row, Workload

from zinfer import LLM, AsyncLLM
from zinfer.errors import ConfigError
from zinfer.planning import pass_sizes
from zinfer.planning.job_estimator import JobEstimator
from zinfer.planning.kv_budget import BatchingBudget
from zinfer.planning.latency import describe_latency, describe_unreachable, predict_latency, usual_lengths
from zinfer.planning.memory import Footprint
from zinfer.planning.step_time import PassTime
from zinfer.scheduling.latency_target import LatencyTarget
from zinfer.scheduling.pass_order import PassOrder
from zinfer.scheduling.pass_seconds import FREE_SLACK, PassSeconds

__all__ = ["alone", "folder", "prompts"]  # fixtures

MOST = 16_384


def pass_s(num_tokens: int, floor_s: float, fixed_s: float, token_s: float) -> float:
    """Streaming takes ``floor_s`` whatever is computed meanwhile."""
    return max(floor_s, fixed_s + num_tokens * token_s)


CURVES = st.builds(
    lambda *numbers: partial(pass_s, floor_s=numbers[0], fixed_s=numbers[1], token_s=numbers[2]),
    st.sampled_from([0.0, 0.09, 0.5]),
    st.sampled_from([0.001, 0.02]),
    st.floats(1e-6, 1e-3),
)


@given(curve=CURVES, latency_s=st.floats(1e-3, 5), most=st.integers(1, MOST))
def test_a_pass_has_as_many_tokens_as_the_time_has_room_for(curve: Any, latency_s: float, most: int) -> None:
    found = LatencyTarget(latency_s, curve, most)
    num_tokens = found.order().most_tokens
    assert num_tokens is not None
    assert 1 <= num_tokens <= most
    assert curve(num_tokens) <= found.reachable_s
    assert num_tokens == most or curve(num_tokens + 1) > found.reachable_s
    assert found.reachable_s == max(latency_s, FREE_SLACK * curve(1))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", range(25))
def test_measured_passes_correct_a_wrong_prediction(number: int) -> None:
    """One up to four times too high or too low; also after the device was busy for ten passes."""
    chance = random.Random(number)
    right = [chance.choice([0, 0.09, 0.5]), chance.choice([0.001, 0.02]), 10 ** chance.uniform(-6, -3)]
    wrong = [each * chance.choice([0.25, 0.5, 1, 2, 4]) for each in right]
    names, latency_s = ("floor_s", "fixed_s", "token_s"), 10 ** chance.uniform(-2.3, 0.3)
    real, planned = (partial(pass_s, **dict(zip(names, each, strict=True))) for each in (right, wrong))
    target = LatencyTarget(latency_s, planned, MOST)
    reachable_s = max(latency_s, FREE_SLACK * real(1))
    sizes = []
    for at in range(800):
        num_tokens = target.order().most_tokens or 0
        sizes.append(num_tokens)
        target.observe(num_tokens, real(num_tokens) * (20 if 300 <= at < 310 else 1))
        target.observe(1, real(1))
    for settled in (sizes[60:300], sizes[-200:]):
        assert sum(real(size) > 1.1 * reachable_s for size in settled) <= len(settled) // 10
        assert sorted(settled)[len(settled) // 2] >= PassSeconds(real).most_tokens(latency_s, MOST) // 4


@pytest.mark.parametrize(("latency_s", "wanted"), [(0.018, 512), (0.03, 1024), (0.05, 1024), (0.1, 3500)])
def test_passes_fill_what_they_are_padded_to(latency_s: float, wanted: int) -> None:
    """Larger ones are launched by Python, which takes longer than predicted and says nothing of those that are not."""
    chance, sizes = random.Random(0), (64, 128, 256, 512, 1024)
    target = LatencyTarget(latency_s, lambda num_tokens: num_tokens / 38e3, MOST, sizes=sizes)
    orders = []
    for _ in range(600):
        num_tokens = target.order().most_tokens or 0
        orders.append(num_tokens)
        padded = next((size for size in sizes if num_tokens <= size), num_tokens)
        real_s = padded / 35e3 if padded <= 1024 else max(0.065, num_tokens / 35e3)
        target.observe(num_tokens, real_s * chance.uniform(0.97, 1.02))
    settled = orders[100:]
    assert sorted(settled)[len(settled) // 2] == pytest.approx(wanted, rel=0.03 if wanted > 1024 else 0)
    if wanted <= 1024:
        assert sum(order != wanted for order in settled) < len(settled) // 100


@pytest.mark.parametrize(
    ("latency_s", "sizes", "least", "most"),
    [(0.03, (), 560, 580), (0.03, (64, 128), 128, 128), (0.05, (64, 128), 128, 128), (0.1, (64, 128), 700, 850)],
)
def test_prompts_go_on_where_python_launches_for_longer(
    latency_s: float, sizes: tuple[int, ...], least: int, most: int
) -> None:
    """By 72 ms a pass, in which 570 tokens are computed; now and then the device's queue is full."""
    target = LatencyTarget(latency_s, lambda num_tokens: 0.015 + num_tokens / 10e3, MOST, sizes=sizes)
    orders = []
    for number in range(300):
        num_tokens = target.order().most_tokens or 0
        orders.append(num_tokens)
        planned_s = 0.015 + num_tokens / 10e3
        is_launched = num_tokens > max(sizes, default=0)
        if is_launched:
            target.observe_launch(0.3 if number % 5 == 1 else 0.072)
        target.observe(num_tokens, max(0.072, 1.1 * planned_s) if is_launched else planned_s)
        target.observe(10, 0.02)
    assert all(least <= each <= most for each in orders[50:]), orders[50:]


def test_running_sequences_come_first_and_prompts_in_chunks() -> None:
    rows = [Row(0, 0, 40, number % 3, 30, 60, at, None) for number, at in enumerate((0, 0, 3, 3, 3, 9))]
    workload = Workload(rows, Room(16, 9000, 300, 20, None, "arrival", None, orders=(12,)))
    workload.run()
    for chunks, following in zip(workload.compositions, workload.compositions[1:], strict=False):
        assert sum(end - begin for _, begin, end in chunks) <= 12
        decoding = {number for number, begin, end in chunks if end >= 40}
        ended = {each.number for each in workload.sequences if each.number in decoding} - {
            number for number, *_ in following
        }
        for number in ended:
            assert (number, 68, 69) in chunks, "a sequence that runs is in every pass"
    assert max(len(chunks) for chunks in workload.compositions) > 4


@given(rows=st.lists(ROWS, min_size=1, max_size=16), orders=st.lists(st.integers(1, 60), min_size=1, max_size=9))
def test_every_sequence_says_what_it_says_alone_whatever_time_there_is(rows: list[Row], orders: list[int]) -> None:
    for num_spare in (0, 400):
        Workload(rows, Room(16, num_spare, 300, 20, 20, "arrival", None, orders=tuple(orders))).run()


def test_more_run_than_a_pass_may_have_tokens_after_it_got_shorter() -> None:
    rows = [Row(0, 0, 5, number % 3, 40, 60, 0, None) for number in range(12)]
    workload = Workload(rows, Room(16, 9000, 300, 20, None, "arrival", None, orders=(100,) * 5 + (4,) * 995))
    workload.run()
    assert all(len(chunks) == 12 for chunks in workload.compositions[:40])
    assert [each.output_ids for each in workload.sequences] == [completion(row.prompt, 40) for row in rows]


def test_an_llm_keeps_to_the_order_and_says_what_it_says_without(
    folder: Any,
    prompts: Any,
    alone: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LatencyTarget, "order", lambda target: PassOrder(8))
    for tier in ("device", "host"):
        with LLM(folder, device="cpu", kv_cache_memory="2MB", kv_cache_tier=tier, max_token_latency="1s") as llm:
            found = llm.generate(by_ids(prompts), max_new_tokens=NUM_NEW)
            assert [each.token_ids for each in found] == alone
            assert max(size.num_tokens for size, _ in llm.passes()) == 8


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("config", "most"),
    [
        ({}, 16),
        ({"interactive": False}, None),
        ({"zero_optimization": {"offload_param": {"device": "cpu"}}}, None),
        ({"max_token_latency": "100s"}, None),
    ],
)
def test_passes_are_short_where_somebody_waits(
    config: dict[str, Any], most: int | None, folder: Any, prompts: Any, alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pass_sizes, "_SHORT_PASS_TOKENS", 16)
    monkeypatch.setattr(pass_sizes, "_SHORT_PASS_PRODUCTS", 1000)

    async def complete(llm: AsyncLLM) -> None:
        found = [each async for each in llm.stream(by_ids(prompts), max_new_tokens=NUM_NEW)]
        assert [each.token_ids for each in sorted(found, key=lambda each: each.prompt_index)] == alone

    llm = AsyncLLM(folder, device="cpu", kv_cache_memory="2MB", **config)
    with llm.llm:
        asyncio.run(complete(llm))
        largest = max(size.num_tokens for size in llm.llm._batcher.pass_sizes)
        assert largest == most if most is not None else largest > 16


def test_passes_of_the_background_are_larger_until_somebody_waits(
    folder: Any, prompts: Any, alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pass_sizes, "_SHORT_PASS_TOKENS", 16)
    monkeypatch.setattr(pass_sizes, "_SHORT_PASS_PRODUCTS", 1000)
    with LLM(folder, device="cpu", kv_cache_memory="2MB", interactive=True) as llm:
        sizes = llm._batcher.pass_sizes
        found = llm.generate(by_ids(prompts), max_new_tokens=NUM_NEW, is_background=True)
        assert [each.token_ids for each in found] == alone
        assert max(size.num_tokens for size in sizes) == 8 * 16
        behind = llm.prepare(by_ids(prompts), max_new_tokens=NUM_NEW, is_background=True)
        waited = llm.prepare(by_ids(prompts), max_new_tokens=NUM_NEW)
        llm.submit(waited)
        llm.submit(behind)
        assert [each.token_ids for each in sorted(waited, key=lambda each: each.prompt_index)] == alone
        assert [each.token_ids for each in sorted(behind, key=lambda each: each.prompt_index)] == alone
        assert max(size.num_tokens for size in sizes[:3]) == 16, "both wait"


def test_small_models_have_larger_passes() -> None:
    assert [pass_sizes.short_pass_tokens(10**exponent) for exponent in (6, 8, 10)] == [10**6, 10**4, 1024]


def test_a_time_that_cannot_be_reached_is_said_once(folder: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), LLM(folder, device="cpu", max_token_latency="0.0001ms") as llm:
        assert len(llm.generate("", max_new_tokens=1)) == 1
        order = llm._batcher.order()
        assert order.most_tokens is not None
        assert order.most_tokens >= 1
    [line] = [each.message for each in caplog.records if "max_token_latency" in each.message]
    assert line.startswith("max_token_latency: 0.0001 ms cannot be reached, because a pass of one token takes ")
    caplog.clear()
    with LLM(folder, device="cpu", max_token_latency=60):
        assert "max_token_latency" not in caplog.text


def estimator(latency_s: float | None = None, num_pages: int = 10_000) -> JobEstimator:
    """A model whose weights cross the link in 90 ms, beside which 9,000 tokens are computed."""

    def pass_time(num_tokens: int, num_rows: int, **sizes: int) -> PassTime:
        return PassTime(num_tokens, 0.0, 0.09, 0.0, num_tokens * 1e-5, sizes["cache_bytes"] / 1e12)

    budget = BatchingBudget(
        16_384,
        16_384,
        1024,
        num_pages,
        64,
        torch.float16,
        "arrival",
        lends=True,
        footprint=Footprint(num_pages * 64_000, 0, 0),
    )
    return JobEstimator(budget, None, 1000, pass_time, latency_s)


def test_usual_requests_are_no_longer_than_the_model_allows() -> None:
    assert [usual_lengths(most) for most in (None, 2048, 640, 64, 2)] == [(512, 128)] * 3 + [(52, 12), (1, 1)]


def test_times_under_load() -> None:
    one, few, many, more = predict_latency(estimator(), 512, 128, (1, 16, 1024, 4096))
    assert (one.between_s, one.first_token_s, one.tokens_per_s) == (0.09, pytest.approx(0.135), pytest.approx(1 / 0.09))
    assert few.between_s == 0.09, "more requests are free while the link is the slowest"
    assert few.tokens_per_s == pytest.approx(16 * one.tokens_per_s)
    assert more.tokens_per_s == pytest.approx(many.tokens_per_s), "a thousand run at once"
    # Three quarters of 4,096 wait until three thousand before them have ended.
    assert more.first_token_s == pytest.approx(many.first_token_s + 3072 * 128 / many.tokens_per_s)
    scarce = predict_latency(estimator(num_pages=100), 512, 128, (16,))[0]
    assert scarce.tokens_per_s == pytest.approx(10 * one.tokens_per_s), "ten pages each"
    line = describe_latency([one, few], 512, 128)
    assert line == (
        "requests of 512 tokens in and 128 out, 1 at once: 135 ms to the first token, then 90 ms a token; "
        "16 at once: 135 ms to the first token, then 90 ms a token"
    )


def test_a_latency_costs_the_first_tokens_of_long_prompts() -> None:
    usual, limited = (predict_latency(estimator(each, 100_000), 16_000, 128, (1, 128)) for each in (None, 0.1))
    assert estimator(0.1).most_tokens == pytest.approx(10_000, abs=1)
    assert usual[1].between_s > 0.15
    assert [each.between_s <= 0.1 for each in limited] == [True, True]
    assert limited[1].first_token_s > usual[1].first_token_s
    assert describe_unreachable(estimator(0.1)) is None
    assert describe_unreachable(estimator()) is None
    assert describe_unreachable(estimator(0.05)) == (
        "max_token_latency: 50 ms cannot be reached, because a pass of one token takes 90 ms (link); 94.5 ms can, with "
        "passes of 9,449 tokens at most"
    )
    assert estimator(0.1).of_texts([16_000], 4).num_passes == 5
    sets = estimator(0.3)
    sets = replace(sets, budget=replace(sets.budget, num_sets=3))
    assert sets.most_tokens == pytest.approx(estimator(0.1).most_tokens, abs=1)


@pytest.mark.parametrize("value", ["fast", 0, "-1s", "5m", True, None, "1e400s"])
def test_only_times_are_times(folder: Any, value: Any) -> None:
    if value is None:
        assert LLM(folder, device="cpu", max_token_latency=value).close() is None
        return
    with pytest.raises(ConfigError, match=r'max_token_latency = .*: expected a time above 0 in seconds.*"200ms"'):
        LLM(folder, device="cpu", max_token_latency=value)
