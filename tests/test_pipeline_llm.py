"""`LLM` on stages of a pipeline: passes of several sets are under way at once, and every call gets its own tokens."""

import random
import signal
import time
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import ragged_models
import torch
from checkpoints import random_prompts, tiny_checkpoint, tiny_model
from jobs_support import letters_model, prompt_rows, read_rows, write_rows
from llm_support import token_bytes
from ranks_support import Failed, Ranks, run_ranks, wait_for_all
from test_lockstep import Passes, given_calls, made, recorded
from test_pipeline import NUM_LAYERS, config

from zinfer import LLM, SamplingParams
from zinfer.errors import RankError
from zinfer.jobs.job import run_job
from zinfer.jobs.summary import JobSummary
from zinfer.requests.completion import Completion

NUM_PROMPTS = 12
PAGE_SIZE = 8
SIZES: dict[str, Any] = {
    "speculate": "ngram",
    "kv_page_size": PAGE_SIZE,
    "kv_cache_memory": "200kB",
    "tokens_per_pass": 40,
}
Text = tuple[tuple[int, ...], str, str | None, list[list[int]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("llm"), num_layers=NUM_LAYERS, tie=False)


def given() -> tuple[list[dict[str, list[int]]], list[SamplingParams]]:
    """Unequal prompts, two of which begin alike, with greedy and sampled texts of unequal lengths."""
    ids = random_prompts(NUM_PROMPTS, min_tokens=3, max_tokens=20, seed=3)
    ids[5] = ids[4] = [*range(2, 26), 7]
    params = [
        SamplingParams(
            max_new_tokens=12 + place,
            temperature=0.9 if place % 2 else 0,
            seed=place,
            presence_penalty=0.5 if place == 7 else 0,
            allowed_token_ids=(5, 9, 20) if place == 6 else None,  # so that it repeats itself, and is guessed
            logprobs=1 if place == 3 else None,
            prompt_logprobs=2 if place in (4, 5, 8) else None,
            n=2 if place == 1 else 1,
            ignore_eos=True,
        )
        for place in range(NUM_PROMPTS)
    ]
    return [{"prompt_token_ids": each} for each in ids], params


def likely_ids(completion: Completion) -> list[list[int]]:
    """The tokens that could most likely have been in the places of the prompt's own."""
    return [each.top_ids for each in completion.prompt_logprobs or () if each is not None]


def told(rank: int, folder: Path, several: list[dict[str, Any]]) -> list[tuple[list[Text], Passes, int]]:
    """The texts of two calls, the passes, and the pages under each configuration."""
    found = []
    for settings in several:
        with LLM(folder, settings) as llm:
            passes = recorded(llm)
            wait_for_all()  # or the first stage may begin before
            texts = [
                (each.token_ids, each.finish_reason, each.error, likely_ids(each))
                for completions in (
                    llm.generate(*given()),
                    llm.generate([{"prompt_token_ids": [4] * 9}], max_new_tokens=20),
                )
                for each in completions
            ]
            assert llm.predict([9] * 8, 5).seconds > 0
            found.append((texts, passes, llm.batching.num_pages))
    return found


def few_pages(folder: Path, stages: int, num_pages: int = 13) -> int:
    """Bytes for so many pages of the layers of the stage that has the most."""
    return num_pages * PAGE_SIZE * token_bytes(folder) * -(-NUM_LAYERS // stages) // NUM_LAYERS


@pytest.mark.sampled(2)
@pytest.mark.parametrize("stages", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_stages_tell_what_one_process_tells(folder: Path, stages: int) -> None:
    def several(stages: int) -> list[dict[str, Any]]:
        found = [config("nvme", stages, **SIZES | {"kv_cache_memory": few_pages(folder, stages)})]
        if stages != 3:
            found.append(config("cpu", stages, **SIZES | {"kv_cache_tier": "host", "admission_order": "longest_first"}))
        return found

    [[alone]] = run_ranks(1, told, folder, [config("cpu", 1, **SIZES)])
    first, *others = run_ranks(stages, told, folder, several(stages))
    for found in others:
        assert found == first, "the same passes with the same pages"
    assert first[0][2] == 13, "pages are agreed"
    assert {"out", "in"} <= {each[0] for each in first[0][1]}, "few pages preempt sequences"
    for texts, _, _ in first:
        assert texts == alone[0]
    assert len({token for token_ids, *_ in alone[0] for token in token_ids}) > 30
    assert [len(scores) for *_, scores in alone[0] if scores] == [24, 24, len(given()[0][8]["prompt_token_ids"]) - 1]


def served(rank: int, folder: Path, stages: int) -> tuple[Passes, dict[int, list[list[Any]]]]:
    """The passes and results of threads that generate, leave and cancel, with other delays on each rank."""
    chance = random.Random(rank)
    with LLM(folder, config("cpu", stages, **SIZES | {"kv_cache_memory": few_pages(folder, stages)})) as llm:
        passes = recorded(llm)
        results: dict[int, list[list[Any]]] = {}

        def run(thread: int) -> None:
            results[thread] = [made(llm, call, chance) for call in given_calls(thread)]

        run(0)
        llm.reset_prefix_cache()
        threads = [Thread(target=run, args=(number,)) for number in range(1, 4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return passes, results


def generated(rank: int, folder: Path) -> list[list[dict[tuple[int, int], Completion]]]:
    """What one process completes of each thread's calls, by prompt and sample."""
    with LLM(folder, config("cpu", **SIZES)) as llm:
        return [
            [
                {(each.prompt_index, each.sample_index): each for each in llm.generate(call.prompts, call.params)}
                for call in given_calls(thread)
            ]
            for thread in range(4)
        ]


@pytest.mark.slow
def test_calls_of_several_threads_make_equal_passes_on_three_stages(tmp_path: Path) -> None:
    folder = letters_model(tmp_path, num_layers=NUM_LAYERS)
    first, *others = run_ranks(3, served, folder, 3)
    for found in others:
        assert found == first
    passes, results = first
    assert len(passes) > 50
    assert results.keys() == set(range(4))
    [alone] = run_ranks(1, generated, folder)
    for thread in range(4):
        for wanted, found in zip(alone[thread], results[thread], strict=True):
            for each in filter(None, (getattr(each, "completion", each) for each in found)):
                other = wanted[each.prompt_index, each.sample_index]
                if each.finish_reason == "cancelled":
                    assert other.token_ids[: len(each.token_ids)] == each.token_ids
                else:
                    assert replace(each, logprobs=other.logprobs) == other


def meeting(rank: int, folder: Path, notes: Path) -> list[set[int]]:
    """Generates; the second stage ends each pass only once the first has begun the next. Returns the passes' rows."""
    with LLM(folder, config("cpu", 2, **SIZES)) as llm:
        passes, runner, num_begun = recorded(llm), llm._runner, 0
        run = runner.run

        def noted(batch: Any) -> torch.Tensor:
            nonlocal num_begun
            (notes / f"begun-{num_begun}-{rank}").touch()
            num_begun += 1
            logits: torch.Tensor = run(batch)
            if rank == 1 and num_begun < 20:
                wait_for(notes / f"begun-{num_begun}-0")
            return logits

        runner.run = noted  # type: ignore[method-assign]
        wait_for_all()
        prompts = random_prompts(6, min_tokens=5, max_tokens=9)
        llm.generate([{"prompt_token_ids": each} for each in prompts], max_new_tokens=16, ignore_eos=True)
        return [{number for number, *_ in each} for each in passes]


def wait_for(path: Path) -> None:
    until_s = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < until_s, f"nothing made {path.name}"
        time.sleep(0.002)


def test_two_passes_of_different_sets_are_under_way_at_once(folder: Path, tmp_path: Path) -> None:
    first, second = run_ranks(2, meeting, folder, tmp_path)
    assert first == second
    assert len(first) > 30
    for before, after in pairwise(first):
        assert not before & after, "the sequences of the pass before are still on the other stage"


def broken(rank: int, folder: Path, stages: int) -> list[Text]:
    """Texts of prompts that share pages; one of them has a token whose embedding is NaN."""
    prompts = [[*range(2, 20), token] for token in (27, 28, 29)] + [[30, 127, 31]]
    with LLM(folder, config("cpu", stages, **SIZES)) as llm:
        found = llm.generate([{"prompt_token_ids": each} for each in prompts], max_new_tokens=6, ignore_eos=True)
        return [(each.token_ids, each.finish_reason, each.error) for each in found]


@pytest.mark.slow
def test_broken_logits_are_told_alike_on_all_stages(tmp_path: Path) -> None:
    model = tiny_model("llama", num_layers=NUM_LAYERS, tie=False)
    model.get_input_embeddings().weight.data[27] = float("nan")
    model.save_pretrained(tmp_path)
    first, second = run_ranks(2, broken, tmp_path, 2)
    [alone] = run_ranks(1, broken, tmp_path, 1)
    assert first == second
    assert [each[:2] for each in first] == [each[:2] for each in alone]
    assert [reason for _, reason, _ in first] == ["error", "length", "length", "length"]
    assert "what comes before the first layer" in str(alone[0][2])
    assert "what comes before model.layers.2" in str(first[0][2])


def lasting(rank: int, folder: Path, notes: Path) -> str:
    """Generates until another rank fails; returns what is told."""
    said = "no error"
    with suppress(RankError), LLM(folder, config("cpu", 3, **SIZES)) as llm:
        (notes / f"begun-{rank}").touch()
        try:
            while True:
                llm.generate(*given())
        except RankError as error:
            said = str(error)
    return said


@pytest.mark.slow
@pytest.mark.parametrize("lost", [pytest.param(0, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_killed_stage_ends_the_others(folder: Path, tmp_path: Path, lost: int) -> None:
    with Ranks(3, lasting, folder, tmp_path) as ranks:
        ranks.wait_until(lambda: all((tmp_path / f"begun-{rank}").exists() for rank in range(3)))
        time.sleep(0.3)
        begin_s = time.monotonic()
        ranks.kill(lost, signal.SIGKILL)
        found = ranks.results()
    assert time.monotonic() - begin_s < 30
    for rank in {0, 1, 2} - {lost}:
        assert not isinstance(found[rank], Failed), found[rank]
        assert f"rank {lost} " in found[rank]


def job(rank: int, folder: Path, output: str, parallel: dict[str, int]) -> JobSummary:
    settings = {
        "zero_optimization": {"offload_param": {"device": "cpu"}},
        "zinfer": {"parallel": parallel, "kv_cache_memory": "400KB"},
    }
    files = (folder / "model", folder / "in.jsonl", folder / output)
    return run_job(*files, config=settings, device="cpu", batch_size=3)


@pytest.mark.slow
def test_a_job_on_replicas_of_two_stages_writes_each_row_once(tmp_path: Path) -> None:
    letters_model(tmp_path / "model", num_layers=4)
    write_rows(tmp_path / "in.jsonl", prompt_rows(24))
    run_ranks(1, job, tmp_path, "alone.jsonl", {"replicas": 1})
    wanted = {row["id"]: row for row in read_rows(tmp_path / "alone.jsonl")}
    found = run_ranks(4, job, tmp_path, "stages.jsonl", {"replicas": 2, "pipeline": 2})
    rows = read_rows(tmp_path / "stages.jsonl")
    assert len(rows) == len(wanted) == 24
    assert {row["id"]: row for row in rows} == wanted
    passes = [stats.passes for stats in (found[0].stats, *found[0].other_ranks) if stats is not None]
    assert len(passes) == 4
    assert passes[0] == passes[1] > 0
    assert passes[2] == passes[3] > 0


def family_texts(rank: int, folders: list[Path], stages: int) -> list[list[tuple[int, ...]]]:
    prompts = [{"prompt_token_ids": each} for each in random_prompts(4, min_tokens=3, max_tokens=30)]
    found = []
    for folder in folders:
        with LLM(folder, config("cpu", stages, kv_page_size=8, kv_cache_memory="1MB")) as llm:
            found.append([each.token_ids for each in llm.generate(prompts, max_new_tokens=8)])
    return found


@pytest.mark.slow
def test_every_family_tells_the_same_on_two_stages(tmp_path: Path) -> None:
    names = sorted(ragged_models.FAMILIES)
    for name in names:
        ragged_models.tiny_model(name, 3).save_pretrained(tmp_path / name)
    folders = [tmp_path / name for name in names]
    [alone] = run_ranks(1, family_texts, folders, 1)
    for found in run_ranks(2, family_texts, folders, 2):
        assert dict(zip(names, found, strict=True)) == dict(zip(names, alone, strict=True))
