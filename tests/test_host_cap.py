"""`zinfer.max_host_memory` bounds weights, staging slots, the KV cache in host memory, and swapped pages."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from checkpoints import random_prompts, tiny_checkpoint
from engines import loaded
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from jobs_support import letters_model, prompt_rows, write_rows

from zinfer import LLM, SamplingParams
from zinfer.errors import PlanError
from zinfer.kv_cache.swap import SwapSpace

PAGES = {"kv_page_size": 4, "kv_cache_memory": 40 * 4 * 1280, "num_slots": 2}
"""Forty pages of four tokens, for sequences that want more: some are preempted all the time."""
DISK = {"zero_optimization": {"offload_param": {"device": "nvme"}}}
PARAMS = SamplingParams(max_new_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("model"))


def swapped_most(llm: LLM) -> tuple[int, int, int]:
    """Complete many prompts; returns the most bytes of swapped pages at once, host bytes without them, and planned."""
    seen, swap_out = [0], SwapSpace.swap_out

    def noted(self: SwapSpace, *args: Any) -> None:
        swap_out(self, *args)
        seen.append(sum(part.nbytes for kept in self._kept.values() if isinstance(kept, list) for part in kept))

    with patch.object(SwapSpace, "swap_out", noted):
        prompts = [{"prompt_token_ids": ids} for ids in random_prompts(12)]
        assert all(completion.error is None for completion in llm.generate(prompts, PARAMS))
    return max(seen), llm.stats().host_bytes, llm.host_bytes


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("cap", "swaps"), [("400kB", "few"), ("20MB", "many")])
def test_swapped_pages_are_within_the_cap(folder: Path, cap: str, swaps: str) -> None:
    with LLM(folder, device="cpu", max_host_memory=cap, **PAGES) as llm:
        most = llm.batching.most_swapped_in_memory
        swapped_bytes, host_bytes, planned_bytes = swapped_most(llm)
    num_bytes = int(float(cap[:-2]) * {"kB": 10**3, "MB": 10**6}[cap[-2:]])
    assert swapped_bytes > 0
    assert swapped_bytes + host_bytes <= planned_bytes <= num_bytes
    assert (most < 10) == (swaps == "few"), "a quarter of the pages, or less where the cap is small"


@pytest.mark.slow
@pytest.mark.parametrize("homes", [{}, DISK])
def test_pages_in_host_memory_are_within_the_cap(folder: Path, homes: dict[str, Any]) -> None:
    with LLM(folder, homes, device="cpu", max_host_memory="2MB", kv_cache_tier="host", **PAGES) as llm:
        swapped_bytes, host_bytes, planned_bytes = swapped_most(llm)
    assert swapped_bytes == 0
    assert PAGES["kv_cache_memory"] <= host_bytes <= planned_bytes <= 2 * 10**6


@given(cap=st.integers(1, 2_000_000), tier=st.sampled_from(["device", "host"]), on_disk=st.booleans())
@examples(max_examples=12)
def test_any_cap_is_kept_or_refused(folder: Path, cap: int, tier: str, on_disk: bool) -> None:
    def planned_bytes(nbytes: int) -> int:
        keys: dict[str, Any] = {**PAGES, "kv_cache_tier": tier, "max_weight_memory": 400_000}
        with LLM(folder, DISK if on_disk else {}, device="cpu", max_host_memory=nbytes, **keys) as llm:
            return llm.host_bytes

    least = cap
    try:
        found = planned_bytes(cap)
    except PlanError as error:
        named = re.search(r"at least (\d+) bytes", str(error))
        least = int(named[1]) if named else PAGES["kv_cache_memory"] * 10  # pages in host memory are more than the cap
        found = planned_bytes(least)
    assert found <= least
    assert cap <= least


@pytest.mark.sampled(2)
@pytest.mark.parametrize("tier", ["device", "host"])
def test_a_cap_above_what_is_free_is_allowed_and_said(
    folder: Path, tier: str, caplog: pytest.LogCaptureFixture
) -> None:
    said = "zinfer.max_host_memory is 800.00 TB, more than the "
    with LLM(folder, device="cpu", max_host_memory="800TB", kv_cache_tier=tier, **PAGES) as llm:
        assert llm.generate([{"prompt_token_ids": [5, 6]}], max_new_tokens=2)[0].error is None
    with loaded(folder, max_host_memory="800TB") as engine:
        assert engine.plan.host_bytes < 800 * 10**12
    assert caplog.text.count(said) == 2


@pytest.mark.slow
def test_a_job_says_that_a_cap_is_above_what_is_free(tmp_path: Path) -> None:
    letters_model(tmp_path / "model", num_layers=2)
    write_rows(tmp_path / "in.jsonl", prompt_rows(3))
    (tmp_path / "ds.json").write_text('{"zinfer": {"device": "cpu", "max_host_memory": "800TB"}}')
    command = ["run", "--model", "model", "--input", "in.jsonl", "--output", "out.jsonl", "--config", "ds.json"]
    done = subprocess.run([sys.executable, "-m", "zinfer", *command], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "zinfer.max_host_memory is 800.00 TB, more than the " in " ".join(done.stderr.split())
