"""Ranks in lockstep make the same passes, whatever happens on each of them at other times, and get the same results."""

import asyncio
import random
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import aclosing, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread
from typing import Any
from unittest.mock import patch

import pytest
import torch
from checkpoints import random_prompts
from jobs_support import letters_model
from llm_support import token_bytes
from lockstep_support import keeping_step, one_thread
from ranks_support import Ranks, run_ranks, wait_for_all

from zinfer import LLM, AsyncLLM, SamplingParams, StructuredOutputsParams
from zinfer.errors import ConfigError, RankError
from zinfer.ranks.sockets import SILENCE_S
from zinfer.requests.completion import CompletionDelta

SIZES: dict[str, Any] = {"device": "cpu", "kv_page_size": 8, "kv_cache_memory": "200kB", "tokens_per_pass": 40}
NUM_THREADS = 4
NUM_PAGES = 13  # the longest sequence takes eleven
STRUCTURES = {1: StructuredOutputsParams(regex="[a-z]{2}( [0-9]+)*"), 3: StructuredOutputsParams(choice=["yes", "no!"])}
"""By the place of a call among those of its thread."""
Passes = list[tuple[Any, ...]]
Results = dict[int, list[list[Any]]]
Served = tuple[Passes, Results]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return letters_model(tmp_path_factory.mktemp("letters"))


@contextmanager
def in_lockstep(folder: Path, size: int, **options: Any) -> Iterator[tuple[LLM, Passes]]:
    """An `LLM` in lockstep with those of other ranks, each with the whole model, and the passes that it makes."""
    with keeping_step(size), LLM(folder, parallel={"replicas": size}, **{**SIZES, **options}) as llm:
        passes = recorded(llm)
        wait_for_all()  # or the first rank may begin before
        yield llm, passes


def recorded(llm: LLM) -> Passes:
    """The passes of an `LLM`, as they are made: what is swapped, and each chunk's sequence, places and pages."""
    passes: Passes = []
    cache: Any = llm._cache
    swap_out, swap_in, expect = cache.swap_out, cache.swap_in, cache.expect

    def note_out(number: int, pages: Any) -> None:
        passes.append(("out", number, tuple(pages)))
        swap_out(number, pages)

    def note_in(number: int, pages: Any) -> None:
        passes.append(("in", number, tuple(pages)))
        swap_in(number, pages)

    def note(chunks: Any) -> None:
        passes.append(tuple((each.number, begin, end, tuple(each.pages)) for each, begin, end, *_ in chunks))
        expect(chunks)

    cache.swap_out, cache.swap_in, cache.expect = note_out, note_in, note
    return passes


@dataclass(frozen=True)
class Given:
    """A call: its kind, its prompts and their params."""

    kind: str
    prompts: list[dict[str, list[int]]]
    params: list[SamplingParams]


def given_calls(thread: int, num_calls: int = 4) -> list[Given]:
    """The calls that a thread makes, the same on all ranks."""
    chance = random.Random(thread)
    found = []
    for number in range(num_calls):
        kind = chance.choice(["generate", "deltas", "leave", "cancel"])
        ids = random_prompts(chance.randint(1, 5), min_tokens=3, max_tokens=40, seed=chance.randrange(1000))
        shared = random_prompts(1, min_tokens=24, max_tokens=24, seed=chance.randrange(2))[0]
        prompts = [{"prompt_token_ids": shared * chance.randrange(2) + each} for each in ids]
        found.append(Given(kind, prompts, [given_params(chance, number) for _ in prompts]))
    return found


def given_params(chance: random.Random, number: int) -> SamplingParams:
    is_greedy = chance.random() < 0.4
    return SamplingParams(
        max_new_tokens=chance.randint(2, 24),
        temperature=0 if is_greedy else chance.uniform(0.5, 1.5),
        n=1 if is_greedy else chance.randint(1, 3),
        seed=number if chance.random() < 0.5 else None,
        stop=("e", "ab") if chance.random() < 0.3 else (),
        logprobs=1 if chance.random() < 0.2 else None,
        ignore_eos=True,
        structured_outputs=STRUCTURES.get(number),
    )


def made(llm: LLM, call: Given, chance: random.Random) -> list[Any]:
    """What a call yields, in the order of its arrival; delays are this rank's own."""
    time.sleep(chance.uniform(0, 0.03))
    if call.kind == "generate":
        return list(llm.generate(call.prompts, call.params))
    if call.kind == "leave":
        with closing(llm.stream(call.prompts, call.params)) as stream:
            return [next(stream)]
    handle = llm.prepare(call.prompts, call.params, deltas=call.kind == "deltas")
    llm.submit(handle)
    if call.kind == "cancel":
        time.sleep(chance.uniform(0, 0.03))
        llm.cancel(handle)
    return list(handle)


def served(rank: int, folder: Path, size: int, several: list[dict[str, Any]]) -> list[Served]:
    """The passes and results of threads' calls under each configuration, with other delays on each rank."""
    found = []
    for options in several:
        chance = random.Random(rank)
        with in_lockstep(folder, size, **options) as (llm, passes):
            results: Results = {}

            def run(thread: int, llm: LLM = llm, results: Results = results, chance: random.Random = chance) -> None:
                results[thread] = [made(llm, call, chance) for call in given_calls(thread)]

            run(0)
            llm.reset_prefix_cache()
            threads = [Thread(target=run, args=(number,)) for number in range(1, NUM_THREADS)]
            chance.shuffle(threads)
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            results[NUM_THREADS] = [llm.generate([{"prompt_token_ids": [4] * 110}, "ab"], max_new_tokens=10)]
        found.append((passes, results))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("size", "num_configs"), [(2, 2), (4, 1)])
def test_calls_of_several_threads_make_equal_passes(folder: Path, size: int, num_configs: int) -> None:
    few_pages = {"speculate": "ngram", "kv_cache_memory": NUM_PAGES * SIZES["kv_page_size"] * token_bytes(folder)}
    configs = [few_pages, {"admission_order": "longest_first", "kv_cache_tier": "host", "max_sequences": 5}]
    first, *others = run_ranks(size, served, folder, size, configs[:num_configs])
    for found in others:
        assert found == first
    assert all(len(passes) > 50 and results.keys() == set(range(NUM_THREADS + 1)) for passes, results in first)
    assert {"out", "in"} <= {each[0] for each in first[0][0]}, "few pages preempt sequences"
    [[too_long, fitting]] = first[0][1][NUM_THREADS]
    assert "pages" in str(too_long.error)
    assert fitting.error is None
    check_alone(folder, first[0][1])


def check_alone(folder: Path, results: Results) -> None:
    """Compare with the completions of one process, but for those that were cancelled."""
    num_cancelled = num_checked = 0
    with one_thread(), LLM(folder, **SIZES) as llm:
        for thread in range(NUM_THREADS):
            for call, found in zip(given_calls(thread), results[thread], strict=True):
                wanted = {
                    (each.prompt_index, each.sample_index): each for each in llm.generate(call.prompts, call.params)
                }
                completions = [each for each in (getattr(each, "completion", each) for each in found) if each]
                assert len(completions) == (1 if call.kind == "leave" else len(wanted))
                for each in completions:
                    if each.finish_reason == "cancelled":
                        assert call.kind == "cancel"
                        num_cancelled += 1
                    else:
                        place = each.prompt_index, each.sample_index
                        other = wanted[place] if (params := call.params[place[0]]).seed is not None else None
                        if other is None:  # drawn with the seed that the first rank chose
                            own = params if params.is_greedy else replace(params, n=1, seed=each.seed)
                            (other,) = llm.generate(call.prompts[place[0]], own)
                            other = replace(other, prompt_index=place[0], sample_index=place[1])
                        assert replace(each, logprobs=other.logprobs) == other  # they depend on the batch's size
                        num_checked += 1
    assert num_cancelled > 0
    assert num_checked > 25


def asynchronous(rank: int, folder: Path) -> list[list[CompletionDelta]]:
    """What tasks of an `AsyncLLM` get, of which one leaves early and others begin at times of this rank's own."""
    chance = random.Random(rank)

    async def run(llm: AsyncLLM, number: int) -> list[CompletionDelta]:
        await asyncio.sleep(chance.uniform(0, 0.05))
        params = SamplingParams(max_new_tokens=5 + number, temperature=1, ignore_eos=True)
        found = []
        async with aclosing(llm.generate("abcde"[: 1 + number % 3], params)) as deltas:
            async for delta in deltas:
                found.append(delta)
                if number == 5:
                    break
        return found

    async def run_all() -> list[list[CompletionDelta]]:
        # The first rank's clock decides how many tokens a pass has.
        async with AsyncLLM(folder, parallel={"replicas": 2}, max_token_latency="5ms", **SIZES) as llm:
            return await asyncio.gather(*(run(llm, number) for number in range(8)))

    with keeping_step(2):
        return asyncio.run(run_all())


def test_tasks_get_equal_tokens(folder: Path) -> None:
    first, second = run_ranks(2, asynchronous, folder)
    assert first == second
    assert [len(deltas) for deltas in first] == [5 + number if number != 5 else 1 for number in range(8)]


_kept: list[LLM] = []


def unclosed(rank: int, folder: Path) -> list[str]:
    """A process that ends without closing its `LLM`; the second one long before the first."""
    with keeping_step(2):
        _kept.append(LLM(folder, parallel={"replicas": 2}, **SIZES))
    found = [each.text for each in _kept[0].generate(["ab", "abc"], max_new_tokens=5)]
    time.sleep(1 - rank)
    return found + [each.text for each in _kept[0].generate("abcd", max_new_tokens=5) if rank == 0]


@pytest.mark.slow
def test_processes_end_without_closing(folder: Path) -> None:
    first, second = run_ranks(2, unclosed, folder)
    assert first[:2] == second
    assert first[2]


def agreed(rank: int, folder: Path) -> tuple[list[tuple[int, ...]], str]:
    """The sizes of ranks that state other ones, where they can agree and where not."""
    page_bytes = SIZES["kv_page_size"] * token_bytes(folder)
    stated = {"max_sequences": 4 + rank, "tokens_per_pass": 30 - rank, "kv_cache_memory": (20 - rank) * page_bytes}
    found: list[tuple[int, ...]] = []
    for tier in ("device", "host"):
        with in_lockstep(folder, 2, kv_cache_tier=tier, **stated) as (llm, _):
            llm.generate("ab", max_new_tokens=5)
            budget = llm.batching
            found.append(
                (budget.max_sequences, budget.tokens_per_pass, budget.num_pages, budget.kv_bytes // page_bytes)
            )
    try:
        with in_lockstep(folder, 2, kv_page_size=8 << rank):
            return found, "agreed"
    except ConfigError as error:
        return found, str(error)


@pytest.mark.slow
def test_ranks_agree_on_the_least_sizes(folder: Path) -> None:
    first, second = run_ranks(2, agreed, folder)
    assert first == second
    sizes, told = first
    assert sizes == [(4, 29, 19, 19)] * 2
    host = socket.gethostname()
    assert told.startswith(f"rank 1 on {host} has other sizes than rank 0 on {host} (tokens_per_pass 40")
    assert "kv_page_size 16" in told
    assert told.endswith("; give all ranks the same configuration and model")


def parting(rank: int, folder: Path) -> list[str]:
    """What this rank is told in several sad stories."""
    told: list[str] = []

    def tell(llm: LLM, prompt: str, num_calls: int = 1) -> None:
        try:
            for _ in range(num_calls):
                llm.generate(prompt, max_new_tokens=60, ignore_eos=True)
            told.append("done")
        except (RankError, FloatingPointError) as error:
            told.append(f"{type(error).__name__}: {error}")
        except RuntimeError as error:
            told.append(f"RuntimeError: {error} from {error.__cause__}")

    with in_lockstep(folder, 2) as (llm, _):
        if rank == 1:
            time.sleep(0.3)  # the first rank has closed by then
            tell(llm, "ab")
        tell(llm, ("ab", "cd")[rank])
    hasty = patch.multiple("zinfer.batching.following_loop", _MOST_WAIT_S=0.3, _LOOK_S=0.1)
    with hasty, in_lockstep(folder, 2) as (llm, _):
        if rank == 1:
            tell(llm, "cd")
        time.sleep(0.6)
        tell(llm, "ab")
    for unlike in (0, 1):
        with suppress(RankError, FloatingPointError), in_lockstep(folder, 2) as (llm, _):
            if rank == unlike:
                llm._model.layers[0].register_forward_hook(boom)
            tell(llm, "ab", 1000)
            tell(llm, "ab")
    with suppress(RankError), in_lockstep(folder, 2) as (llm, _):
        if rank == 1:
            llm._model.layers[0].register_forward_hook(lambda module, args, output: torch.flip(output, (-1,)))
        tell(llm, "ab", 1000)
    return told


def boom(*_: Any) -> None:
    raise FloatingPointError("boom")


def test_ranks_that_part_are_told_why(folder: Path) -> None:
    first, second = run_ranks(2, parting, folder)
    host = socket.gethostname()
    closed = "RuntimeError: this LLM was closed; make a new one from boom"
    parted = (
        f"RankError: rank 1 on {host} made another pass, or drew other tokens, than rank 0 on {host}; give all ranks "
        "the same files, software and kind of device"
    )
    boomed = [f"RankError: rank {rank} on {host}: FloatingPointError: boom" for rank in range(2)]
    assert first == ["done", "done", "FloatingPointError: boom", closed, boomed[1], boomed[1], parted]
    assert second == [
        "done",
        f"RankError: rank 0 on {host} has closed its LLM",
        f"RankError: rank 0 on {host} has not made the same call in 0.3 s; ranks that share a model make the same "
        "calls with the same arguments",
        "done",
        boomed[0],
        boomed[0],
        *second[6:7],
        closed,
        parted,
    ]
    assert second[6] in ("FloatingPointError: boom", closed), (
        "closed by its failure, if that was in a call of rank 0 before its own"
    )


def lasting(rank: int, folder: Path, notes: Path) -> str:
    """Generates until another rank fails; returns what is told."""
    with suppress(RankError), in_lockstep(folder, 2) as (llm, _):
        (notes / f"begun-{rank}").touch()
        try:
            while True:
                llm.generate(["ab", "abc"], max_new_tokens=60, ignore_eos=True)
        except RankError as error:
            (notes / f"told-{rank}").write_text(str(error))
            llm.close()
    return "ended"


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_a_lost_rank_ends_the_other(folder: Path, tmp_path: Path, lost: int, number: signal.Signals) -> None:
    with Ranks(2, lasting, folder, tmp_path) as ranks:
        ranks.wait_until(lambda: all((tmp_path / f"begun-{rank}").exists() for rank in range(2)))
        time.sleep(0.2)
        ranks.kill(lost, number)
        assert ranks.result_of(1 - lost, timeout_s=240) == "ended"
    told = (tmp_path / f"told-{1 - lost}").read_text()
    assert f"rank {lost} on {socket.gethostname()}" in told
    is_silent = number == signal.SIGSTOP
    assert (f"has not answered for {SILENCE_S} s" in told) == is_silent, "of one that was killed its connections tell"
