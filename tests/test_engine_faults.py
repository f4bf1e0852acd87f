"""Exceptions, reentrant calls and failing files leave the engine exact, and nothing of a failed load behind."""

import gc
import os
import shutil
import threading
from pathlib import Path

import pytest
import torch
from engine_support import (
    NUM_LAYERS,
    Raised,
    eager,
    engine,
    folder,
    greedy,
    logits_of,
)
from engines import config_for, engine_for
from threads import open_descriptors, settled_threads
from transformers import PreTrainedModel

import zinfer
from zinfer.nvme.reader import DiskReadError

__all__ = ["eager", "engine", "folder"]  # fixtures


@pytest.mark.sampled(24)
@pytest.mark.parametrize("error", [Raised, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("place", [0, 3, NUM_LAYERS - 1, "lm_head"])
def test_an_exception_in_the_middle_leaves_the_engine_exact(
    engine: zinfer.InferenceEngine, eager: PreTrainedModel, error: type[BaseException], when: str, place: int | str
) -> None:
    expected = greedy(eager)
    module = engine.module.lm_head if place == "lm_head" else engine.module.model.layers[place].mlp

    def fail(*args: object) -> None:
        raise error

    hook = module.register_forward_pre_hook(fail) if when == "before" else module.register_forward_hook(fail)
    for _ in range(2):
        with pytest.raises(error):
            greedy(engine)
    hook.remove()
    for _ in range(2):
        assert torch.equal(greedy(engine), expected)
    layer = engine.module.model.layers[NUM_LAYERS - 1]
    assert all(parameter.is_meta for parameter in layer.parameters())


def test_a_failed_pass_leaves_no_block_bound(folder: Path) -> None:
    """Until the next call too: the slot of the block that failed will hold another's bytes."""
    with engine_for(folder, "disk") as engine:

        def fail(*args: object) -> None:
            raise Raised

        engine.module.model.layers[2].mlp.register_forward_pre_hook(fail)
        with pytest.raises(Raised):
            greedy(engine)
        assert all(parameter.is_meta for parameter in engine.module.parameters())


def test_a_call_from_within_a_hook_is_refused_or_exact(folder: Path, eager: PreTrainedModel) -> None:
    """A hook that asks the engine something must not deadlock it."""
    with engine_for(folder, "host", 3) as engine:
        answers: list[torch.Tensor] = []

        def ask(*args: object) -> None:
            hook.remove()
            answers.append(logits_of(engine))

        hook = engine.module.model.layers[1].mlp.register_forward_pre_hook(ask)
        outcome: list[object] = []

        def call() -> None:
            try:
                outcome.append(logits_of(engine))
            except Exception as error:
                outcome.append(error)

        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        thread.join(20)
        assert outcome, "the engine waits for itself"
        expected = logits_of(eager)
        if not isinstance(outcome[0], Exception):
            assert torch.equal(outcome[0], expected)  # type: ignore[arg-type]
            assert torch.equal(answers[0], expected)
        assert torch.equal(logits_of(engine), expected)


@pytest.mark.parametrize("homes", ["disk", "mixed"])
def test_a_file_cut_short_while_running(folder: Path, eager: PreTrainedModel, tmp_path: Path, homes: str) -> None:
    own = shutil.copytree(folder, tmp_path / "model")
    shards = sorted(own.glob("*.safetensors"))
    expected = greedy(eager)
    with engine_for(own, homes) as engine:
        assert torch.equal(greedy(engine), expected)
        saved = {shard: (shard.read_bytes(), shard.stat().st_mtime_ns) for shard in shards}
        for shard in shards:
            os.truncate(shard, 5000)
        for _ in range(2):
            with pytest.raises(DiskReadError, match=r": reading at byte \d+: the file has changed since") as caught:
                greedy(engine)
            assert Path(caught.value.filename) in shards
            assert caught.value.errno
            assert caught.value.offset >= 0
        for shard, (content, mtime_ns) in saved.items():
            shard.write_bytes(content)
            os.utime(shard, ns=(mtime_ns, mtime_ns))
        for _ in range(2):
            assert torch.equal(greedy(engine), expected)


def test_an_io_error_while_loading_leaves_nothing_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, descriptors = settled_threads(), open_descriptors()
    real = os.preadv
    calls = []

    def preadv(fd: int, buffers: object, offset: int, *flags: int) -> int:
        calls.append(offset)
        if len(calls) > 3:
            raise OSError(5, "Input/output error")
        return real(fd, buffers, offset, *flags)

    monkeypatch.setattr(os, "preadv", preadv)
    for homes in ("resident", "host"):
        calls.clear()
        with pytest.raises(DiskReadError, match=r"safetensors: reading at byte \d+: Input/output error"):
            zinfer.init_inference(folder, config_for(folder, homes, 2, "cpu"))
    gc.collect()
    assert settled_threads() == threads
    assert open_descriptors() == descriptors
