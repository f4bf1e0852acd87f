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
from jobs_support import letters_model
from ranks_support import run_ranks

from zinfer import LLM, Completion, SamplingParams
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
