"""`zinfer.LLM` with keys and values at home in host memory: the tokens of pages on the device, and the bytes moved."""

from pathlib import Path
from typing import Any

import pytest
from llm_support import NUM_NEW, alone, by_ids, folder, prompts, token_bytes

from zinfer import LLM, SamplingParams

__all__ = ["alone", "folder", "prompts"]  # fixtures

PARAMS = SamplingParams(max_new_tokens=NUM_NEW)


def hosted(folder: Path, device: str = "cpu", *, home: str = "none", **options: Any) -> LLM:
    config = {"zero_optimization": {"offload_param": {"device": home}}}
    return LLM(folder, config, device=device, kv_cache_tier="host", **options)


@pytest.mark.parametrize("home", ["none", "nvme"])
@pytest.mark.parametrize("synchronous", [False, True])
@pytest.mark.parametrize(
    ("tokens_per_pass", "num_pages", "page_size"), [(1, 80, 1), (7, 10, 8), (64, 9, 8), (1000, 64, 16), (50, 1, 128)]
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
