"""Ranks whose devices hold all that they divide copy each other's ranges as they like: none waits for another."""

import gc
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import tiny_checkpoint
from rank_engines import check_equal, check_lost, computed, config, inputs_of
from ranks_support import run_ranks

import zinfer

DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
NUM_LAYERS = 21  # one more than ranks keep as wholes


def whole_bytes(folder: Path, bits: int | None = None, device: str = "cpu") -> int:
    """What one process keeps of the model on its device."""
    [(_, stats)] = computed(0, [(folder, config("none", bits, device), {})], (1,))
    return stats.device_bytes


def divided(folder: Path, bits: int | None = None, device: str = "cpu") -> dict[str, Any]:
    """A configuration with too little device memory for whole layers on each of two ranks."""
    return config("none", bits, device, whole_bytes(folder, bits, device) * 9 // 10)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("llama"), num_layers=NUM_LAYERS, tie=False)


@DEVICES
def test_the_bits_are_those_of_one_process(llama: Path, tmp_path: Path, device: str) -> None:
    gpt2 = tiny_checkpoint("gpt2", tmp_path, num_layers=NUM_LAYERS)
    check_equal([(folder, divided(folder, device=device), {}) for folder in (llama, gpt2)], 2, (3, 1))


@pytest.mark.slow
def test_codes_and_four_ranks(llama: Path) -> None:
    check_equal([(llama, divided(llama, bits), {}) for bits in (8, 4)], 2, (3, 1))
    check_equal([(llama, divided(llama), {})], 4, (1, 4, 2, 0))


def alone(rank: int, folder: Path, settings: dict[str, Any], done: Path) -> tuple[int, int, list[str]]:
    """The second rank does nothing until the first one has called twice, and computes nothing at all.

    Returns the bytes copied from the other rank in two calls, those on the device, and the names of threads.
    """
    engine = zinfer.init_inference(folder, settings)
    try:
        names = [each.name for each in threading.enumerate()]
        if rank == 0:
            for _ in range(2):
                engine(**inputs_of(rank))
            done.touch()
        while not done.exists():
            time.sleep(0.01)
        return engine.stats().gathered_bytes, engine.stats().device_bytes, names
    finally:
        engine.destroy()


@pytest.mark.slow
def test_a_rank_needs_no_thread_of_the_others(llama: Path, tmp_path: Path) -> None:
    (pulled, held, names), (nothing, _, others) = run_ranks(2, alone, llama, divided(llama), tmp_path / "done")
    assert not {"zinfer-gather", "zinfer-rank-service"} & {*names, *others}
    assert nothing == 0
    whole = whole_bytes(llama)
    assert 2 * (whole - held) <= pulled < 2 * whole, "what it lacks, in two calls and ahead of a third"


def forgetting(rank: int, folder: Path, settings: dict[str, Any], forgotten: int, gone: Path) -> torch.Tensor:
    """One rank leaves its engine to the garbage collector, the other one calls until that has happened."""
    engine = zinfer.init_inference(folder, settings)
    logits: torch.Tensor = engine(**inputs_of(rank)).logits
    if rank == forgotten:
        gone.touch()
        del engine
        gc.collect()
        return logits
    while not gone.exists():
        logits = engine(**inputs_of(rank)).logits
    logits = engine(**inputs_of(rank)).logits
    engine.destroy()
    return logits


@pytest.mark.slow
@pytest.mark.parametrize("forgotten", [0, 1])
def test_an_engine_that_was_not_destroyed_is_not_waited_for(llama: Path, tmp_path: Path, forgotten: int) -> None:
    settings = divided(llama)
    found = run_ranks(2, forgetting, llama, settings, forgotten, tmp_path / "gone")
    for rank, logits in enumerate(found):
        [(alone, _)] = computed(rank, [(llama, config("none"), {})], (1, 1))
        assert torch.equal(logits, alone["logits"])


def injected(rank: int, folder: Path, settings: dict[str, Any]) -> list[list[int]]:
    """What an `LLM` completes, whose passes are replayed with fused kernels on a GPU."""
    with zinfer.LLM(folder, settings) as llm:
        prompts = [inputs_of(rank)["input_ids"][0].tolist()] * 2
        several = llm.generate([{"prompt_token_ids": ids} for ids in prompts], zinfer.SamplingParams(max_tokens=6))
        return [list(each.token_ids) for each in several]


@pytest.mark.gpu
def test_fused_kernels_leave_what_others_copy_as_it_is(tmp_path: Path) -> None:
    """Rows of GPT-2's matrices are made contiguous in place where nobody else reads them."""
    gpt2 = tiny_checkpoint("gpt2", tmp_path, num_layers=NUM_LAYERS)
    alone = [injected(rank, gpt2, config("none", None, "cuda")) for rank in range(2)]
    assert run_ranks(2, injected, gpt2, divided(gpt2, None, "cuda")) == alone


@pytest.mark.slow
@DEVICES
@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_a_lost_rank_ends_the_other(
    llama: Path, tmp_path: Path, lost: int, number: signal.Signals, device: str
) -> None:
    check_lost((llama, divided(llama, device=device), {}), tmp_path, lost, number)
