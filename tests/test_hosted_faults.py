"""Keys and values in host memory: sizes that cannot be, calls that are cut short, preempted sequences, and closing."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from llm_support import NUM_NEW, alone, by_ids, folder, prompts, token_bytes
from plan_support import rates
from races_support import late_streams
from transformers import AutoModelForCausalLM

from zinfer import LLM, SamplingParams
from zinfer.batching import runner
from zinfer.config import resolve_settings
from zinfer.errors import ConfigError, PlanError
from zinfer.kv_cache.host import HostedKVCache

__all__ = ["alone", "folder", "prompts"]  # fixtures

PARAMS = SamplingParams(max_new_tokens=NUM_NEW)


@pytest.mark.sampled(24)
@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("the device failed")])
@pytest.mark.parametrize("name", ["expect", "fetch_layer", "release_layer", "_fetch"])
@pytest.mark.parametrize("num_good", [0, 3, 11])
def test_a_call_that_is_cut_short_leaves_the_next_one_right(
    folder: Path,
    prompts: list[list[int]],
    alone: list[tuple[int, ...]],
    device: str,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    name: str,
    num_good: int,
) -> None:
    real, calls = getattr(HostedKVCache, name), 0

    def cut(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == num_good + 1:
            raise error
        return real(*args)

    sizes = {"kv_page_size": 4, "kv_cache_memory": 40 * 4 * token_bytes(folder), "tokens_per_pass": 40}
    with LLM(folder, device=device, kv_cache_tier="host", **sizes) as llm:
        for _ in range(2):
            calls = 0
            with monkeypatch.context() as patched:
                patched.setattr(HostedKVCache, name, cut)
                with pytest.raises(type(error)):
                    llm.generate(by_ids(prompts), PARAMS)
            assert [each.token_ids for each in llm.generate(by_ids(prompts), PARAMS)] == alone


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(3))
def test_calls_that_are_left_and_closed_while_copies_are_late(
    folder: Path,
    prompts: list[list[int]],
    alone: list[tuple[int, ...]],
    device: str,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
) -> None:
    with late_streams(device, seed, queued=device == "cpu") as (open_stream, opened):
        late = partial(HostedKVCache, open_stream=open_stream, gap_bytes=1000 * seed)
        monkeypatch.setattr(runner, "HostedKVCache", late)
        sizes = {"kv_page_size": 4, "kv_cache_memory": 60 * 4 * token_bytes(folder), "tokens_per_pass": 40}
        llm = LLM(folder, device=device, kv_cache_tier="host", **sizes)
        each_ends = [SamplingParams(max_new_tokens=1 + number) for number in range(len(prompts))]
        for _ in range(2):
            left = llm.stream(by_ids(prompts), each_ends)
            next(left)
            left.close()
            assert [each.token_ids for each in llm.generate(by_ids(prompts), PARAMS)] == alone
        under_way = llm.stream(by_ids(prompts), each_ends)
        next(under_way)
        llm.close()
        assert not any(stream.num_under_way for stream in opened), "memory is given back while it is copied"
        with pytest.raises(RuntimeError, match="this LLM was closed"):
            list(under_way)


@pytest.mark.slow
def test_texts_that_host_memory_cannot_hold_are_kept_on_the_disk_where_that_is_cheaper(
    folder: Path,
    prompts: list[list[int]],
    alone: list[tuple[int, ...]],
    device: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fast = rates(disk_bytes_per_s=1e12, flops_per_s=1e9)
    for found in (fast, replace(fast, disk_bytes_per_s=1.0)):
        monkeypatch.setattr("zinfer.engine.estimator.known_rates", lambda *args, found=found: found)
        config = {"zero_optimization": {"offload_param": {"nvme_path": str(tmp_path)}}}
        sizes = {"kv_page_size": 4, "kv_cache_memory": 24 * 4 * token_bytes(folder)}
        with LLM(folder, config, device=device, kv_cache_tier="host", **sizes) as llm:
            assert llm.batching.most_swapped_in_memory == 0
            assert [each.token_ids for each in llm.generate(by_ids(prompts), PARAMS)] == alone
            stats = llm.stats()
            assert (stats.swapped_bytes_written > 0) == (stats.swapped_bytes_read > 0) == (found is fast)


def test_pages_in_host_memory_are_lent_to_no_weights(folder: Path, prompts: list[list[int]], device: str) -> None:
    config = {"zero_optimization": {"offload_param": {"device": "nvme"}}}
    with LLM(folder, config, device=device, kv_cache_tier="host", kv_cache_memory="2MB") as llm:
        llm.generate(by_ids(prompts[:2]), PARAMS)
        stats = llm.stats()
    assert stats.bytes_to_device >= (stats.passes - 1) * stats.disk_bytes_per_pass


def test_more_than_the_host_has_is_refused(folder: Path) -> None:
    message = r'kv_cache_memory is 3.00 MB, and zinfer\.kv_cache_tier is "host".*max_host_memory.* leave 2.00 MB; lower'
    with pytest.raises(PlanError, match=message):
        LLM(folder, device="cpu", kv_cache_tier="host", kv_cache_memory="3MB", max_host_memory="2MB")
    model = AutoModelForCausalLM.from_pretrained(folder)
    weights = {"zero_optimization": {"offload_param": {"device": "cpu"}}}
    message = r"max_host_memory is 2.00 MB; at least .* no file holds, and 1.97 MB of KV cache; lower zinfer\.kv"
    with pytest.raises(PlanError, match=message):
        LLM(model, weights, device="cpu", kv_cache_tier="host", kv_cache_memory="1.99MB", max_host_memory="2MB")


def test_pages_in_host_memory_are_pinned(folder: Path) -> None:
    config = {"zero_optimization": {"offload_param": {"pin_memory": False}}, "zinfer": {"kv_cache_tier": "host"}}
    with pytest.raises(ConfigError, match=r'kv_cache_tier = "host" contradicts .*pin_memory = false: .* pinned memory'):
        resolve_settings(config)
    with pytest.raises(ConfigError, match='one of "auto", "device", "host"'):
        resolve_settings(kwargs={"kv_cache_tier": "disk"})


@pytest.mark.gpu
def test_pinned_bytes_are_the_pages(folder: Path) -> None:
    with LLM(folder, device="cuda", kv_cache_tier="host", kv_cache_memory="64MB") as llm:
        stats = llm.stats()
        assert llm.batching.kv_bytes <= stats.pinned_bytes <= stats.host_bytes
        assert torch.cuda.memory_allocated() >= llm.batching.footprint.kv_bytes
