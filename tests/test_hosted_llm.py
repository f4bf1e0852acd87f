"""`zinfer.LLM` with keys and values at home in host memory: the tokens of pages on the device, and the bytes moved."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import tiny_checkpoint
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llm_support import NUM_NEW, SIZES, alone, by_ids, folder, prompts, token_bytes

from zinfer import LLM, SamplingParams

__all__ = ["alone", "folder", "prompts"]  # fixtures

PARAMS = SamplingParams(max_new_tokens=NUM_NEW)


def hosted(folder: Path, device: str = "cpu", *, home: str = "none", **options: Any) -> LLM:
    config = {"zero_optimization": {"offload_param": {"device": home}}}
    return LLM(folder, config, device=device, kv_cache_tier="host", **options)


@pytest.mark.sampled(20)
@pytest.mark.parametrize("home", ["none", "nvme"])
@pytest.mark.parametrize("synchronous", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("tokens_per_pass", "num_pages", "page_size"), [pytest.param(*SIZES[0], marks=pytest.mark.slow), *SIZES[1:]]
)
def test_greedy_tokens_are_those_alone(
    folder: Path,
    prompts: list[list[int]],
    alone: list[tuple[int, ...]],
    device: str,
    home: str,
    synchronous: bool,
    tokens_per_pass: int,
    num_pages: int,
    page_size: int,
) -> None:
    sizes = {"tokens_per_pass": tokens_per_pass, "kv_page_size": page_size, "synchronous": synchronous}
    memory = num_pages * page_size * token_bytes(folder)
    with hosted(folder, device, home=home, kv_cache_memory=memory, **sizes) as llm:
        for _ in range(2):
            found = llm.generate(by_ids(prompts), PARAMS)
            assert [completion.token_ids for completion in found] == alone
        stats = llm.stats()
        assert llm.batching.kv_bytes == memory
    assert stats.kv_bytes_to_device > 0
    assert stats.kv_bytes_to_host > 0
    assert (stats.disk_bytes_per_pass > 0) == (home == "nvme")


def test_the_bytes_of_one_text_are_those_of_its_pages(folder: Path, device: str) -> None:
    """Ten tokens and six new ones, in pages of four: what was written before a pass comes, what it writes goes back."""
    with hosted(folder, device, kv_page_size=4, kv_cache_memory=16 * 4 * token_bytes(folder)) as llm:
        before = llm.stats()
        llm.generate({"prompt_token_ids": list(range(10, 20))}, SamplingParams(max_new_tokens=6, ignore_eos=True))
        stats = llm.stats()
        page_bytes = 4 * token_bytes(folder)
        num_coming = [-(-(10 + number) // 4) for number in range(5)]
        assert stats.kv_bytes_to_device == sum(num_coming) * page_bytes
        assert stats.kv_bytes_to_host == (3 + 5) * page_bytes
        assert stats.bytes_to_device == before.bytes_to_device, "weights are counted by themselves"
        assert stats.host_bytes >= llm.batching.kv_bytes == 16 * page_bytes
        assert llm.batching.footprint.kv_bytes == 3 * 16 * page_bytes // 5, "three slots of one of five layers"
        # The prefix is found in host memory: two whole pages of it.
        llm.generate({"prompt_token_ids": list(range(10, 20))}, SamplingParams(max_new_tokens=1))
        assert llm.stats().kv_bytes_to_device - stats.kv_bytes_to_device == 2 * page_bytes
        assert llm.stats().kv_bytes_to_host - stats.kv_bytes_to_host == page_bytes


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
def test_codes_are_those_of_pages_on_the_device(
    folder: Path, prompts: list[list[int]], device: str, kv_cache_dtype: str
) -> None:
    options = {"device": device, "kv_cache_dtype": kv_cache_dtype, "kv_page_size": 4, "kv_cache_memory": "40kB"}
    with LLM(folder, **options) as llm:
        wanted = [each.token_ids for each in llm.generate(by_ids(prompts), PARAMS)]
    with hosted(folder, **options) as llm:
        assert [each.token_ids for each in llm.generate(by_ids(prompts), PARAMS)] == wanted
        assert llm.stats().kv_bytes_to_device > 0


@pytest.fixture(scope="module", params=[pytest.param("llama", marks=pytest.mark.slow), "mistral"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, LLM]]:
    """A folder, and an LLM with room for everything on the device."""
    made = tiny_checkpoint(request.param, tmp_path_factory.mktemp(request.param))
    with LLM(made, device="cpu", kv_cache_memory="4MB") as llm:
        yield made, llm


@pytest.mark.slow
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 60), st.integers(1, 20), st.integers(1, 12)),
        min_size=1,
        max_size=14,
    ),
    page_size=st.sampled_from([1, 4, 16]),
    num_spare=st.integers(0, 12),
    tokens_per_pass=st.sampled_from([3, 17, 200]),
    home=st.sampled_from(["none", "nvme"]),
)
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_is_asked_and_however_small_the_pool_is(
    model: tuple[Path, LLM],
    rows: list[tuple[int, int, int, int]],
    page_size: int,
    num_spare: int,
    tokens_per_pass: int,
    home: str,
) -> None:
    """Texts that begin alike, that are set aside and computed again, behind windows or not."""
    folder, roomy = model
    asked = [[*begin(family)[:num_common], *([9 + family] * num_own)] for family, num_common, num_own, _ in rows]
    params = [SamplingParams(max_new_tokens=num_new, ignore_eos=True) for *_, num_new in rows]
    wanted = [each.token_ids for each in roomy.generate(by_ids(asked), params)]
    longest = max(len(prompt) + own.max_new_tokens for prompt, own in zip(asked, params, strict=True))
    memory = (-(-longest // page_size) + num_spare) * page_size * token_bytes(folder)
    sizes = {"kv_page_size": page_size, "tokens_per_pass": tokens_per_pass, "kv_cache_memory": memory}
    with hosted(folder, home=home, **sizes) as llm:
        for _ in range(2):
            assert [each.token_ids for each in llm.generate(by_ids(asked), params)] == wanted
        assert llm.batching.most_swapped_pages == 0


def begin(family: int) -> list[int]:
    return [5 + (place * place // (7 + family)) % 90 for place in range(60)]


def test_the_trace_has_the_copies_of_pages(folder: Path, device: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with hosted(folder, device, kv_page_size=4, kv_cache_memory="40kB", trace=str(path)) as llm:
        llm.generate({"prompt_token_ids": list(range(10, 20))}, SamplingParams(max_new_tokens=4, ignore_eos=True))
    events = json.loads(path.read_text())["traceEvents"]
    lanes = {each["tid"]: each["args"]["name"] for each in events if each["ph"] == "M"}
    found = Counter((lanes[each["tid"]], each["name"]) for each in events if each["ph"] == "X")
    for layer in range(5):
        for lane in ("host to device", "device to host"):
            assert found[lane, f"pages of layer {layer}"] == 4
