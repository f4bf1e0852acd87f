"""A conversation goes on where its earlier turns were computed: on the same replica, and from the same pages."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkpoints import random_prompts
from hypothesis import given
from hypothesis import strategies as st
from llm_support import folder

from zinfer import LLM, SamplingParams
from zinfer.serve.errors import ReplicaGone
from zinfer.serve.known_prefixes import KnownPrefixes
from zinfer.serve.replicas import choose

__all__ = ["folder"]  # fixture

TEXT = [number % 97 for number in range(1000)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "options",
    [{}, {"kv_cache_tier": "host"}, {"speculate": "ngram"}, {"max_token_latency": "1s"}, {"max_sequences": 1}],
)
@pytest.mark.parametrize("temperature", [0, 1])
def test_a_second_turn_takes_the_pages_of_the_first(folder: Path, options: dict[str, Any], temperature: int) -> None:
    """Also those of its answer, but for the last token, which was never computed."""
    ids = random_prompts(1, min_tokens=40, max_tokens=40)[0]
    params = SamplingParams(max_new_tokens=20, temperature=temperature, seed=3, allowed_token_ids=(4, 9, 30))
    with LLM(folder, device="cpu", kv_page_size=8, kv_cache_memory="2MB", **options) as llm:
        (first,) = llm.generate({"prompt_token_ids": ids}, params)
        llm.generate({"prompt_token_ids": ids[::-1]}, params)  # somebody else
        second = {"prompt_token_ids": [*ids, *first.token_ids, 7, 8, 9]}
        before = llm.num_tokens
        llm.generate(second, SamplingParams(max_new_tokens=1))
        assert llm.num_tokens - before == 63 - 56
        llm.reset_prefix_cache()
        before = llm.num_tokens
        llm.generate(second, SamplingParams(max_new_tokens=1))
        assert llm.num_tokens - before == 63


@given(begins=st.lists(st.integers(0, 500), min_size=1, max_size=9), length=st.integers(0, 300))
def test_what_was_computed_is_known_in_whole_pages(begins: list[int], length: int) -> None:
    known = KnownPrefixes(10**6)
    for begin in begins:
        known.add(TEXT[begin : begin + length])
    for begin in begins:
        assert known.num_shared(TEXT[begin : begin + length]) == length // 64 * 64
        assert known.num_shared([*TEXT[begin : begin + length], *TEXT]) >= length // 64 * 64
        assert known.num_shared([98, *TEXT[begin:]]) == 0
    assert known.num_shared([]) == 0


def test_no_more_is_known_than_a_cache_holds() -> None:
    known = KnownPrefixes(640)
    known.add(TEXT[:640])
    known.add(TEXT[300:500])
    assert known.num_shared(TEXT[300:500]) == 192
    assert known.num_shared(TEXT) == 448, "its end was forgotten"
    known.add([*TEXT, *TEXT])
    assert known.num_shared(TEXT) == 640


def replica(outstanding: int, *texts: list[int], is_ready: bool = True) -> Any:
    known = KnownPrefixes(10**6)
    for text in texts:
        known.add(text)
    return SimpleNamespace(outstanding=outstanding, prefixes=known, ready=True if is_ready else None)


def test_the_replica_with_the_longest_prefix_gets_a_request_unless_it_is_clearly_busier() -> None:
    idle, knows_some, knows_all = replica(0), replica(500, TEXT[:200]), replica(700, TEXT)
    several = [idle, knows_some, knows_all]
    assert choose(several) is idle
    assert choose(several, TEXT[::-1], 100) is idle
    assert choose(several, TEXT[:300], 100) is knows_all
    assert choose(several, TEXT[:128], 100) is idle, "the others are busier by two such requests"
    assert choose(several, TEXT[:128], 200) is knows_some, "both know it, one of them has less to do"
    knows_all.outstanding = 10**5
    assert choose(several, TEXT[:300], 100) is knows_some
    assert choose([replica(10**5, TEXT), replica(10**5 - 999)], TEXT[:100], 10).outstanding == 10**5
    assert choose([replica(0, TEXT, is_ready=False), knows_all], TEXT) is knows_all
    with pytest.raises(ReplicaGone):
        choose([replica(0, is_ready=False)], TEXT)
