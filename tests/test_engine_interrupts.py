"""Ctrl-C at any moment and calls from several threads: the next answer is exact."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import random_prompts
from engine_support import PROMPT, eager, engine, folder, greedy, logits_of
from engines import engine_for
from threads import interrupted, rings_the_alarm, within
from transformers import PreTrainedModel

import zinfer

__all__ = ["eager", "engine", "folder"]  # fixtures


def test_two_threads_at_once_both_get_their_own_answers(engine: zinfer.InferenceEngine, eager: PreTrainedModel) -> None:
    prompts = [torch.tensor([prompt]) for prompt in random_prompts(4, seed=31)]
    expected = [greedy(eager, input_ids=ids, max_new_tokens=8) for ids in prompts]
    found: dict[tuple[int, int], torch.Tensor] = {}
    failures: list[BaseException] = []
    together = threading.Barrier(4)

    def work(index: int) -> None:
        together.wait()
        try:
            for turn in range(3):
                found[index, turn] = greedy(engine, input_ids=prompts[index], max_new_tokens=8)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert len(found) == 12
    assert all(torch.equal(tokens, expected[index]) for (index, _), tokens in found.items())


@rings_the_alarm
@pytest.mark.parametrize("homes", ["disk", "host"])
def test_ctrl_c_at_any_moment(folder: Path, eager: PreTrainedModel, homes: str) -> None:
    expected = greedy(eager)
    with engine_for(folder, homes, 3) as engine:
        start_s = time.perf_counter()
        assert torch.equal(greedy(engine), expected)
        full_s = time.perf_counter() - start_s
        hits = 0
        for index in range(25):
            hits += interrupted(lambda: greedy(engine), after_s=full_s * (0.02 + 0.037 * index))
            tokens = within(20, lambda: greedy(engine))
            assert tokens is not None, f"after {hits} interrupts the engine hangs or fails"
            assert torch.equal(tokens, expected)
        assert hits >= 8


def seconds_of(run: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    run()
    return time.perf_counter() - start_s


def interrupt_often(run: Callable[[], object], check: Callable[[], torch.Tensor], expected: torch.Tensor) -> int:
    """Cuts ``run`` short at 30 moments, asking ``check`` after each; how many of them came before its end."""
    full_s = min(seconds_of(run) for _ in range(3))
    hits = 0
    for index in range(30):
        hits += interrupted(run, after_s=full_s * (0.02 + 0.031 * index))
        found = within(20, check)
        assert found is not None, f"after {hits} interrupts the engine hangs or fails"
        assert torch.equal(found, expected)
    return hits


@rings_the_alarm
@pytest.mark.parametrize("num_slots", [1, 2])
def test_ctrl_c_while_the_synchronous_twin_reads(
    folder: Path, eager: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, num_slots: int
) -> None:
    """A move goes on after the call that waited for it is gone; its slot must not be taken for free."""
    expected = logits_of(eager)
    real = os.preadv

    def slow(fd: int, buffers: object, offset: int, *flags: int) -> int:
        time.sleep(0.004)
        return real(fd, buffers, offset, *flags)

    with engine_for(folder, "disk", num_slots, synchronous=True) as engine:
        monkeypatch.setattr(os, "preadv", slow)
        hits = interrupt_often(lambda: logits_of(engine), lambda: logits_of(engine), expected)
    assert hits >= 20


@rings_the_alarm
@pytest.mark.parametrize("homes", ["disk", "host"])
def test_ctrl_c_in_a_part_of_the_module_called_alone(folder: Path, eager: PreTrainedModel, homes: str) -> None:
    """Nothing closes such a call: what it has left in use is found by the next."""
    with engine_for(folder, homes, 2) as engine, torch.no_grad():
        hits = interrupt_often(lambda: engine.module.model(PROMPT), lambda: greedy(engine), greedy(eager))
    assert hits >= 10


@pytest.mark.parametrize("place", [0, 2, 4])
def test_an_interrupt_within_a_part_called_alone(
    engine: zinfer.InferenceEngine, eager: PreTrainedModel, place: int
) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    for _ in range(4):  # more often than there are slots
        hook = engine.module.model.layers[place].mlp.register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt), torch.no_grad():
            engine.module.model(PROMPT)
        hook.remove()
        assert torch.equal(greedy(engine), greedy(eager))
