"""Ctrl-C in an engine's calls strikes where nothing is half done; calls of several threads get their own answers."""

import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import random_prompts
from engine_support import PROMPT, eager, engine, folder, greedy
from engines import engine_for
from transformers import PreTrainedModel

import zinfer

__all__ = ["eager", "engine", "folder"]  # fixtures


@pytest.mark.sampled(2)
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


class Strike:
    """Sends this process a SIGINT in the middle of the bookkeeping of a block, where it must not strike."""

    def __init__(self, engine: zinfer.InferenceEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        streamer = engine._running()._streamer
        assert streamer is not None
        self.ended: list[str] = []
        for name in ("wait", "release"):
            monkeypatch.setattr(streamer, name, self._striking(name, getattr(streamer, name)))

    def _striking(self, name: str, real: Callable[..., object]) -> Callable[..., object]:
        def strike(*args: object) -> object:
            if not self.ended:
                signal.raise_signal(signal.SIGINT)
            found = real(*args)
            self.ended.append(name)
            return found

        return strike


@pytest.mark.sampled(2)
@pytest.mark.parametrize("homes", ["disk", "host"])
@pytest.mark.parametrize("of_a_part", [False, True])
def test_ctrl_c_strikes_between_blocks(
    folder: Path, eager: PreTrainedModel, homes: str, monkeypatch: pytest.MonkeyPatch, of_a_part: bool
) -> None:
    """Also where a part of the module is called alone, which nothing closes."""
    expected, handler = greedy(eager), signal.getsignal(signal.SIGINT)
    with engine_for(folder, homes, 2) as engine, torch.no_grad():
        for _ in range(3):
            with monkeypatch.context() as patched:
                strike = Strike(engine, patched)
                with pytest.raises(KeyboardInterrupt):
                    engine.module.model(PROMPT) if of_a_part else greedy(engine)
            assert strike.ended[0] == "wait", "the block that was waited for has come"
            assert strike.ended.count("wait") == 1, "no other was waited for"
            assert signal.getsignal(signal.SIGINT) is handler
            assert torch.equal(greedy(engine), expected)


def test_ctrl_c_at_the_end_of_a_call_is_not_lost(engine: zinfer.InferenceEngine, eager: PreTrainedModel) -> None:
    hook = engine.module.lm_head.register_forward_hook(lambda *_: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        engine(PROMPT)
    hook.remove()
    assert torch.equal(greedy(engine), greedy(eager))


def test_a_second_ctrl_c_strikes_at_once(engine: zinfer.InferenceEngine, eager: PreTrainedModel) -> None:
    """For who will not wait for a disk that hangs."""
    passed: list[int] = []

    def twice(*args: object) -> None:
        signal.raise_signal(signal.SIGINT)
        passed.append(1)
        signal.raise_signal(signal.SIGINT)
        passed.append(2)

    hook = engine.module.model.layers[1].mlp.register_forward_hook(twice)
    with pytest.raises(KeyboardInterrupt):
        engine(PROMPT)
    hook.remove()
    assert passed == [1]
    assert torch.equal(greedy(engine), greedy(eager))


def test_of_two_signals_none_is_left_for_later(engine: zinfer.InferenceEngine, eager: PreTrainedModel) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))

    def both(*args: object) -> None:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)

    hook = engine.module.lm_head.register_forward_hook(both)
    try:
        with pytest.raises(KeyboardInterrupt):
            engine(PROMPT)
    finally:
        signal.signal(signal.SIGTERM, before)
    hook.remove()
    assert seen == [signal.SIGTERM]
    assert torch.equal(greedy(engine), greedy(eager))


def test_a_handler_that_does_not_raise_is_called_and_the_call_goes_on(
    engine: zinfer.InferenceEngine, eager: PreTrainedModel
) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    hook = engine.module.model.layers[1].register_forward_hook(lambda *_: signal.raise_signal(signal.SIGTERM))
    try:
        with torch.no_grad():
            engine(PROMPT)
    finally:
        signal.signal(signal.SIGTERM, before)
    hook.remove()
    assert seen == [signal.SIGTERM]
    assert torch.equal(greedy(engine), greedy(eager))


@pytest.mark.sampled(9)
@pytest.mark.parametrize("place", [0, 2, 4])
def test_an_exception_within_a_part_called_alone(
    engine: zinfer.InferenceEngine, eager: PreTrainedModel, place: int
) -> None:
    def fail(*args: object) -> None:
        raise KeyboardInterrupt

    for _ in range(4):  # more often than there are slots
        hook = engine.module.model.layers[place].mlp.register_forward_pre_hook(fail)
        with pytest.raises(KeyboardInterrupt), torch.no_grad():
            engine.module.model(PROMPT)
        hook.remove()
        assert torch.equal(greedy(engine), greedy(eager))
