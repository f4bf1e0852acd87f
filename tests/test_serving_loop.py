"""Requests of several threads and tasks on one LLM: each comes to what it does alone, however many are cancelled."""

import asyncio
import itertools
import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from jobs_support import letters_model
from threads import settled_threads

from zinfer import LLM, AsyncLLM, Completion, SamplingParams
from zinfer.batching.batcher import Batcher
from zinfer.batching.handle import Handle
from zinfer.batching.request import Request
from zinfer.batching.serving_loop import ServingLoop
from zinfer.errors import ConfigError
from zinfer.requests.completion import CompletionDelta
from zinfer.requests.stop_criteria import StopCriteria

NUM_PROMPTS = 8
SIZES: dict[str, Any] = {"device": "cpu", "kv_page_size": 8, "kv_cache_memory": "2MB", "tokens_per_pass": 40}
PROMPTS = ["ab" * (1 + number) + chr(ord("a") + number) for number in range(NUM_PROMPTS)]
PARAMS = [
    SamplingParams(
        max_new_tokens=2 + number,
        ignore_eos=True,
        temperature=number % 2,
        seed=number,
        stop=("e",) if number == 5 else (),
    )
    for number in range(NUM_PROMPTS)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return letters_model(tmp_path_factory.mktemp("letters"))


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[Completion]:
    """What each prompt comes to by itself."""
    with LLM(folder, **SIZES) as llm:
        return [llm.generate(prompt, own)[0] for prompt, own in zip(PROMPTS, PARAMS, strict=True)]


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    """Its threads are gone at the end, and its pages free before."""
    num_threads = settled_threads()
    with LLM(folder, **SIZES) as made:
        yield made
        made.reset_prefix_cache()  # after the cancels that are under way
        assert made._batcher._scheduler.pool.num_used == 0
        assert made._batcher._scheduler.num_wanted_pages == 0
        assert made._batcher._requests.by_number == made._loop._handles == {}
    assert settled_threads() == num_threads


def prepared(llm: LLM, number: int, **options: Any) -> Handle:
    return llm.prepare(PROMPTS[number], PARAMS[number], **options)


def wanted(completion: Completion) -> tuple[str, tuple[int, ...], str]:
    return completion.text, completion.token_ids, completion.finish_reason


def together(num_threads: int, work: Any) -> None:
    """``work(index)`` in several threads at once; the first of their failures is raised."""
    failures: list[BaseException] = []

    def run(index: int) -> None:
        try:
            work(index)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(1700)
    assert not any(thread.is_alive() for thread in threads), "it hangs"
    for failure in failures:
        raise failure


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("num_each", [15, pytest.param(200, marks=pytest.mark.slow)])
def test_threads_that_submit_and_cancel(llm: LLM, alone: list[Completion], num_each: int) -> None:
    def work(index: int) -> None:
        chance = random.Random(index)
        for _ in range(num_each // 5):
            handles = {}
            for _ in range(5):
                number = chance.randrange(NUM_PROMPTS)
                handle = prepared(llm, number)
                llm.submit(handle)
                handles[handle] = number, chance.random() < 0.5
            for handle, (_, is_cancelled) in handles.items():
                if is_cancelled:
                    llm.cancel(handle)
            for handle, (number, is_cancelled) in handles.items():
                (completion,) = handle
                check(completion, alone[number], is_cancelled=is_cancelled)

    together(8, work)


def check(found: Any, own: Completion, *, is_cancelled: bool) -> None:
    assert isinstance(found, Completion)
    if is_cancelled and found.finish_reason == "cancelled":
        assert found.token_ids == own.token_ids[: len(found.token_ids)]
        assert len(found.token_ids) < len(own.token_ids) or own.finish_reason == "stop"
    else:
        assert wanted(found) == wanted(own)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("num_cancels", [10, pytest.param(250, marks=pytest.mark.slow)])
def test_cancels_while_others_run(llm: LLM, alone: list[Completion], num_cancels: int) -> None:
    """Four threads, each with several requests under way, end one after the other when some tokens of it have come."""

    def work(index: int) -> None:
        chance = random.Random(index)
        under_way: list[tuple[Handle, int, bool]] = []
        num_left = num_cancels
        while num_left or under_way:
            while num_left and len(under_way) < 6:
                number, deltas = chance.randrange(NUM_PROMPTS), chance.random() < 0.5
                handle = prepared(llm, number, deltas=deltas)
                llm.submit(handle)
                under_way.append((handle, number, deltas))
            handle, number, deltas = under_way.pop(chance.randrange(len(under_way)))
            if is_cancelled := num_left > 0 and chance.random() < 0.7:
                if deltas:
                    next(iter(handle))
                llm.cancel(handle)
                num_left -= 1
            *_, last = handle
            found = last.completion if isinstance(last, CompletionDelta) else last
            check(found, alone[number], is_cancelled=is_cancelled)

    together(4, work)


def test_what_is_cancelled_has_the_tokens_so_far(llm: LLM, alone: list[Completion]) -> None:
    reached, go, passes = threading.Event(), threading.Event(), itertools.count()

    def hold(*args: object) -> None:
        if next(passes) == 4:
            reached.set()
            assert go.wait(100)

    hook = llm._model.layers[0].register_forward_pre_hook(hold)
    cancelled, other = prepared(llm, 7), prepared(llm, 6)
    llm.submit(cancelled)
    llm.submit(other)
    assert reached.wait(100)
    llm.cancel(cancelled)
    go.set()
    (found,) = cancelled
    assert isinstance(found, Completion)
    assert found.finish_reason == "cancelled"
    assert 3 <= len(found.token_ids) < len(alone[7].token_ids)
    assert found.token_ids == alone[7].token_ids[: len(found.token_ids)]
    assert [wanted(each) for each in other] == [wanted(alone[6])]  # type: ignore[arg-type]
    hook.remove()


def test_a_failed_pass_ends_those_in_it_alone(llm: LLM, alone: list[Completion]) -> None:
    def fail(*args: object) -> None:
        raise OSError("the disk")

    hook = llm._model.layers[0].register_forward_pre_hook(fail)
    handles = [prepared(llm, number) for number in range(3)]
    for handle in handles:
        llm.submit(handle)
    for handle in handles:
        with pytest.raises(OSError, match="the disk"):
            list(handle)
    hook.remove()
    assert [wanted(each) for each in llm.generate(PROMPTS, PARAMS)] == [wanted(each) for each in alone]


def test_deltas_are_the_completion(llm: LLM, alone: list[Completion]) -> None:
    for number, own in enumerate(alone):
        handle = prepared(llm, number, deltas=True)
        llm.submit(handle)
        deltas = list(handle)
        assert all(isinstance(delta, CompletionDelta) for delta in deltas)
        assert "".join(delta.text for delta in deltas) == own.text
        assert sum((delta.token_ids for delta in deltas), ()) == own.token_ids
        assert [delta.completion for delta in deltas] == [None] * (len(deltas) - 1) + [own]  # type: ignore[union-attr]
    assert len(deltas) == PARAMS[-1].max_new_tokens


def test_a_prompt_that_cannot_be_used_is_one_delta(llm: LLM) -> None:
    handle = llm.prepare([{"prompt_token_ids": []}, PROMPTS[0]], max_new_tokens=1, deltas=True)
    llm.submit(handle)
    first, second = handle
    assert isinstance(first, CompletionDelta)
    assert first.completion is not None
    assert "no tokens" in str(first.completion.error)
    assert second.completion is not None  # type: ignore[union-attr]


def test_an_llm_that_is_dropped_ends_its_threads(folder: Path) -> None:
    num_threads = settled_threads()
    llm = LLM(folder, **SIZES)
    llm.generate(PROMPTS[0], max_new_tokens=1)
    assert settled_threads() > num_threads
    del llm
    assert settled_threads() == num_threads


def test_tasks_share_passes_and_may_be_cancelled(folder: Path, alone: list[Completion]) -> None:
    async def text_of(llm: AsyncLLM, number: int) -> str:
        deltas = [delta async for delta in llm.generate(PROMPTS[number], PARAMS[number])]
        assert wanted(deltas[-1].completion) == wanted(alone[number])  # type: ignore[arg-type]
        return "".join(delta.text for delta in deltas)

    async def run() -> None:
        async with AsyncLLM(folder, **SIZES) as llm:
            endless = SamplingParams(max_new_tokens=100, ignore_eos=True)
            left = asyncio.create_task(anext(llm.stream(PROMPTS, endless)))
            texts = asyncio.gather(*(text_of(llm, number) for number in range(NUM_PROMPTS)))
            async with aclosing(llm.generate(PROMPTS[0], endless)) as deltas:
                assert (await anext(deltas)).completion is None
            left.cancel()
            assert await texts == [each.text for each in alone]
            found = [each async for each in llm.stream(PROMPTS, PARAMS)]
            assert {each.prompt_index: wanted(each) for each in found} == dict(enumerate(map(wanted, alone)))
            with pytest.raises(ConfigError, match="2 params for 1 prompts"):
                await anext(llm.stream("a", [endless, endless]))
            await asyncio.to_thread(llm.llm.reset_prefix_cache)
            assert llm.llm._batcher._scheduler.pool.num_used == 0
        with pytest.raises(RuntimeError, match="this LLM was closed"):
            await anext(llm.generate("a"))

    asyncio.run(run())


class FloodedBatcher:
    """A batcher whose every cancel is followed by another; a request ends with its third pass."""

    def __init__(self) -> None:
        self.loop: ServingLoop | None = None
        self.flood: Handle | None = None
        self.requests: list[Request] = []
        self.num_steps = 0
        self.has_known = False

    def begin(self, requests: list[Request]) -> None: ...

    def abort(self) -> None: ...

    def add(self, request: Request) -> None:
        self.requests.append(request)

    def cancel(self, requests: list[Request]) -> list[Any]:
        if self.loop is not None and self.flood is not None and self.num_steps < 3:
            self.loop.cancel(self.flood)
        return []

    def order(self) -> None: ...

    def step(self, order: None) -> list[Any]:
        self.num_steps += 1
        return [(self.requests[0], Completion(0, 0, "", (), "length"))] if self.num_steps == 3 else []


def test_a_flood_of_commands_does_not_keep_passes_waiting(llm: LLM) -> None:
    batcher = FloodedBatcher()
    batcher.flood = prepared(llm, 1)
    batcher.loop = loop = ServingLoop(cast(Batcher, batcher), torch.device("cpu"), [])
    handle = prepared(llm, 0)
    loop.submit(handle)
    loop.cancel(batcher.flood)
    assert [type(each) for each in handle] == [Completion]
    loop.close()
    assert batcher.num_steps == 3


def test_stop_strings_of_a_request_do_not_make_others_be_looked_at(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: Counter[bool] = Counter()
    reason = StopCriteria.reason

    def counting(criteria: StopCriteria, token_ids: list[int]) -> str | None:
        looks[criteria.reads] += 1
        return reason(criteria, token_ids)

    monkeypatch.setattr(StopCriteria, "reason", counting)
    plain = SamplingParams(max_new_tokens=30, ignore_eos=True)
    stopped = replace(plain, stop=("\U0001f600",))
    found = llm.generate(PROMPTS[:6], [plain, plain, plain, plain, plain, stopped])
    assert {each.finish_reason for each in found} <= {"length", "stop"}
    assert looks[False] == 5, "once each, at its end"
    assert looks[True] == len(found[5].token_ids)
