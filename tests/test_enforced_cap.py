"""torch's allocator is held to the caps of the open engines, and an error beyond them names the cap."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import tiny_checkpoint
from engines import loaded
from plan_support import LLAMA, write_config

from zinfer import LLM, SamplingParams
from zinfer.engine.enforced_cap import EnforcedCap
from zinfer.jobs.bench import run_bench
from zinfer.jobs.bench_request import BenchRequest
from zinfer.probe.limits import allocatable_bytes

GPU = torch.device("cuda", 0)
TOTAL_BYTES, TAKEN_BYTES = 80 * 10**9, 2 * 10**9


@pytest.fixture
def fractions(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The allocator's bounds, one after the other; the last one holds."""
    set_to = [0.9]

    class Card:
        total_memory = TOTAL_BYTES

    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: set_to[-1])
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda bound, device: set_to.append(bound))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: TAKEN_BYTES)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Card)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (TOTAL_BYTES - TAKEN_BYTES, TOTAL_BYTES))
    yield set_to
    assert set_to[-1] == 0.9, "the bound that was there before is there again"


def bound_bytes(fractions: list[float]) -> int:
    return round(fractions[-1] * TOTAL_BYTES)


def test_engines_of_a_process_are_bounded_together(fractions: list[float]) -> None:
    first = EnforcedCap(GPU, 4 * 10**9)
    assert bound_bytes(fractions) == TAKEN_BYTES + 4 * 10**9
    assert allocatable_bytes(GPU) == pytest.approx(4 * 10**9, abs=1)
    second = EnforcedCap(GPU, 10 * 10**9)
    assert bound_bytes(fractions) == TAKEN_BYTES + 14 * 10**9
    without = EnforcedCap(GPU, None)
    assert fractions[-1] == 0.9, "one without a cap has no bound"
    without.close()
    assert bound_bytes(fractions) == TAKEN_BYTES + 14 * 10**9
    second.lower_to(10**9)
    second.lower_to(50 * 10**9)
    assert bound_bytes(fractions) == TAKEN_BYTES + 14 * 10**9, "never above the cap"
    second.lower_to(10**9)
    first.close()
    first.close()
    assert bound_bytes(fractions) == TAKEN_BYTES + 10**9
    second.close()


def test_a_cap_above_the_former_bound_leaves_it(fractions: list[float]) -> None:
    cap = EnforcedCap(GPU, 2 * TOTAL_BYTES)
    assert fractions == [0.9]
    cap.close()
    alone = EnforcedCap(GPU, None)
    alone.lower_to(10**9)
    alone.close()
    assert fractions == [0.9]


def test_an_error_beyond_the_plan_names_the_cap(tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama", tmp_path)

    def too_much(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    with loaded(folder, max_device_memory="30MB") as engine:
        engine.module.forward = too_much
        with pytest.raises(
            torch.OutOfMemoryError, match=r"^zinfer\.max_device_memory is 30\.00 MB.*allocate 2\.00 GiB"
        ):
            engine.call(too_much)
    with loaded(folder) as engine, pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory"):
        engine.call(too_much)


@pytest.mark.gpu
def test_the_driver_counts_less_than_the_cap(tmp_path: Path) -> None:
    """Of this process, beyond CUDA's context; nothing else may run on the device meanwhile."""
    cap, tokens = 4 * 10**9, torch.Generator().manual_seed(0)
    torch.zeros(1, device="cuda")
    torch.cuda.empty_cache()
    total_bytes = torch.cuda.mem_get_info()[1]

    def used_bytes() -> int:
        return total_bytes - torch.cuda.mem_get_info()[0]

    context_bytes = used_bytes()
    shape = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 16, "num_attention_heads": 32}
    model = write_config(tmp_path / "model", {**LLAMA, **shape, "vocab_size": 32_000})
    rows = tmp_path / "rows.jsonl"
    lengths = [16, 4000, 333, 1200, 16, 2500, 640, 3800, 200, 900] * 4
    rows.write_text(
        "".join(
            f'{{"prompt_token_ids": {torch.randint(0, 32_000, (length,), generator=tokens).tolist()}}}\n'
            for length in lengths
        )
    )
    seen, stop = [0], threading.Event()

    def watch() -> None:
        while not stop.wait(0.002):
            seen.append(used_bytes())

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        config = {"zinfer": {"max_device_memory": cap}}
        found = run_bench(BenchRequest(str(model), 16, input=rows, config=config, device="cuda"))
    finally:
        stop.set()
        watching.join()
    assert found.num_new_tokens == 16 * len(lengths)
    assert found.stats.streamed_bytes_per_pass > 0
    assert cap / 2 < max(seen) - context_bytes <= cap
    assert torch.cuda.get_per_process_memory_fraction() == 1.0


@pytest.mark.gpu
def test_more_than_the_cap_is_an_error(tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama", tmp_path)
    with LLM(folder, device="cuda", max_device_memory="2GB") as llm:
        assert llm.generate([{"prompt_token_ids": [5, 6]}], SamplingParams(max_new_tokens=2))[0].error is None
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(3 * 10**9, dtype=torch.uint8, device="cuda")
    assert torch.empty(3 * 10**9, dtype=torch.uint8, device="cuda").numel() == 3 * 10**9
