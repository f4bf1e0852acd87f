"""Ranks in lockstep make the same passes, whatever happens on each of them at other times, and get the same results."""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from checkpoints import random_prompts
from jobs_support import letters_model, prompt_rows, read_rows, write_rows
from ranks_support import run_ranks

from zinfer import LLM, Completion, SamplingParams
from zinfer.jobs.job import run_job
from zinfer.jobs.summary import JobSummary, summary_rows
from zinfer.ranks.mesh import Mesh

SIZES: dict[str, Any] = {"device": "cpu", "kv_page_size": 8, "kv_cache_memory": "200kB", "tokens_per_pass": 40}
Passes = list[tuple[Any, ...]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return letters_model(tmp_path_factory.mktemp("letters"))


@contextmanager
def in_lockstep(folder: Path, size: int, **options: Any) -> Iterator[tuple[LLM, Passes]]:
    """An `LLM` in lockstep with those of other ranks, each with the whole model, and the passes that it makes."""
    with keeping_step(size), LLM(folder, parallel={"replicas": size}, **{**SIZES, **options}) as llm:
        yield llm, recorded(llm)


@contextmanager
def keeping_step(size: int) -> Iterator[None]:
    """Let each ``size`` neighbouring replicas make the same passes, as the ranks of one model do."""

    def ranks_in_step(mesh: Mesh, rank: int) -> tuple[int, ...]:
        first = rank // size * size
        return tuple(range(first, first + size))

    with patch.object(Mesh, "ranks_in_step", ranks_in_step):
        yield


def recorded(llm: LLM) -> Passes:
    """The passes of an `LLM`, as they are made: each chunk's sequence, its tokens' places and its pages."""
    passes: Passes = []
    expect = llm._cache.expect

    def note(chunks: Any) -> None:
        passes.append(tuple((each.number, begin, end, tuple(each.pages)) for each, begin, end, _ in chunks))
        expect(chunks)

    llm._cache.expect = note  # type: ignore[method-assign]
    return passes


def generated(rank: int, folder: Path) -> tuple[Passes, list[list[Completion]]]:
    chance = random.Random(rank)
    with in_lockstep(folder, 2) as (llm, passes):
        found = []
        for call in range(4):
            time.sleep(chance.uniform(0, 0.1))
            prompts = [{"prompt_token_ids": ids} for ids in random_prompts(6, min_tokens=3, max_tokens=30, seed=call)]
            params = [SamplingParams(max_new_tokens=9, temperature=index % 2) for index in range(6)]
            found.append(llm.generate(prompts, params))
        return passes, found


def test_equal_calls_make_equal_passes(folder: Path) -> None:
    first, *others = run_ranks(2, generated, folder)
    for found in others:
        assert found == first


def job(rank: int, folder: Path, output: str, num_ranks: int) -> JobSummary:
    given = {"zero_optimization": {"offload_param": {"device": "cpu"}}, "zinfer": {"parallel": {"replicas": num_ranks}}}
    files = (folder, folder / "in.jsonl", folder / output)
    with keeping_step(2 if num_ranks > 1 else 1):
        return run_job(*files, config=given, device="cpu", batch_size=3)


def test_groups_of_ranks_write_each_row_once(folder: Path) -> None:
    write_rows(folder / "in.jsonl", prompt_rows(36))
    job(0, folder, "alone.jsonl", 1)
    wanted = {row["id"]: row for row in read_rows(folder / "alone.jsonl")}
    found = run_ranks(4, job, folder, "groups.jsonl", 4)
    rows = read_rows(folder / "groups.jsonl")
    assert len(rows) == len(wanted) == 36
    assert {row["id"]: row for row in rows} == wanted
    stats = [found[0].stats, *found[0].other_ranks]
    passes = [each.passes for each in stats]
    assert passes[0] == passes[1] > 0
    assert passes[2] == passes[3] > 0
    said = dict(row for section in summary_rows(found[0]) for row in section)
    assert said["ranks"] == f"4, 2 to each pass: {', '.join(map(str, passes))} passes"
