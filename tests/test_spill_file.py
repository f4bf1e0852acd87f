"""Weights of a module that came in memory, streamed from the disk: the right bytes, and nothing left behind."""

import errno
import gc
import mmap
import os
import signal
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

import commands
import pytest
import ragged_models
import torch
from checkpoints import VOCAB_SIZE, tiny_model
from engines import loaded
from family_models import family_inputs, family_model, forward_inputs
from faults_support import Fault, Holdings, failing_reads, own_descriptors, read_error
from loading_support import DISK, HOST, Tensors, batch, eager_logits, refused
from torch import nn

import zinfer
from zinfer.engine.hooks import StreamingHooks
from zinfer.errors import CheckpointError, ConfigError, PlanError
from zinfer.nvme.reader import DiskReadError
from zinfer.nvme.scratch import ScratchError

__all__ = ["batch"]  # a fixture
KEY = "zero_optimization.offload_param.nvme_path"


def on_disk(folder: Path) -> dict[str, object]:
    return {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": str(folder)}}}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "mixtral"])
def test_it_streams_from_the_disk(batch: Tensors, device: str, family: str, tmp_path: Path) -> None:
    tiny = ragged_models.tiny_model if family == "mixtral" else tiny_model
    model = tiny(family, num_layers=3).to(device)
    layers_bytes = sum(parameter.nbytes for parameter in layers_of(model))
    expected = eager_logits(model, {name: tensor.to(device) for name, tensor in batch.items()})
    path = tmp_path / "made" / "for it"
    engine = zinfer.init_inference(model, on_disk(path), device=device)
    try:
        assert engine.module is model
        assert engine.settings.without_effect == ()
        assert engine.stats().blocks_by_home["HOST"] == 0
        for _ in range(2):
            before = engine.stats().bytes_read_disk
            torch.testing.assert_close(engine(**batch).logits, expected)
            assert engine.stats().bytes_read_disk > before
        assert engine.stats().disk_bytes_per_pass == layers_bytes
        assert list(path.iterdir()) == []
    finally:
        engine.destroy()
    assert list(path.iterdir()) == []


def layers_of(model: nn.Module) -> list[nn.Parameter]:
    return list(next(module for module in model.modules() if isinstance(module, nn.ModuleList)).parameters())


def test_initialize_takes_what_deepspeed_takes(batch: Tensors, tmp_path: Path) -> None:
    model = tiny_model("llama", num_layers=3, tie=True)
    expected = eager_logits(model, batch)
    config = on_disk(tmp_path) | {"zinfer": {"device": "cpu"}}
    engine, *others = zinfer.initialize(model=model, config=config)
    try:
        assert others == [None, None, None]
        assert torch.equal(engine(**batch).logits, expected)
        assert engine.settings.without_effect == ()
    finally:
        engine.destroy()


def test_texts_of_an_llm(tmp_path: Path) -> None:
    prompts: list[Any] = [{"prompt_token_ids": [5, 6, 7]}, {"prompt_token_ids": [9]}]
    params = zinfer.SamplingParams(max_new_tokens=5)
    with zinfer.LLM(tiny_model("llama", num_layers=3), device="cpu", kv_cache_memory="1MB") as llm:
        expected = [completion.token_ids for completion in llm.generate(prompts, params)]
    config = on_disk(tmp_path) | {"zinfer": {"device": "cpu", "kv_cache_memory": "1MB"}}
    with zinfer.LLM(tiny_model("llama", num_layers=3), config) as llm:
        assert [completion.token_ids for completion in llm.generate(prompts, params)] == expected
        assert llm.stats().blocks_by_home["DISK"] == 3


class Block(nn.Module):
    """With weights that lie crosswise, one of no dimension, one that is wide, and a buffer of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.across = nn.Parameter(torch.randn(width, 4).T)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("shift", torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gain * (x @ self.across) @ self.across.T + self.shift


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for width in (3, 1_500_000, 5))  # one weight of 24 MB
        self.blocks.append(self.blocks[0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def test_any_module_whose_blocks_are_named(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model, x = Plain(), torch.randn(2, 4)
    with torch.no_grad():
        expected = model(x)
    with loaded(model, on_disk(tmp_path), injection_policy={Block: ()}) as engine:
        assert engine.stats().blocks_by_home["HOST"] == 0
        assert engine.stats().blocks_by_home["DISK"] >= 3
        for _ in range(2):
            assert torch.equal(engine(x), expected)
        assert engine.stats().bytes_read_disk > 2 * 24_000_000


def test_what_a_module_shares_counts_and_not_what_its_family_ties(tmp_path: Path) -> None:
    """BART's head is one with the embedding that its encoder and decoder share; here with another of the decoder."""
    model = family_model("bart", "BartForConditionalGeneration")
    model.model.decoder.embed_tokens = nn.Embedding(VOCAB_SIZE, 64)
    model.lm_head.weight = model.model.decoder.embed_tokens.weight
    inputs = forward_inputs(model, family_inputs(model))
    with torch.no_grad():
        expected = model(**inputs).logits
    with loaded(model, on_disk(tmp_path)) as engine:
        assert torch.equal(engine(**inputs).logits, expected)


class Odd(Block):
    """What a module may hold beside parameters, and parameters whose bytes do not lie as their values say."""

    def __init__(self) -> None:
        super().__init__(3)
        self.shift = torch.randn(1).expand(4)
        self.register_buffer("scale", torch.randn(4, requires_grad=True))
        with torch.inference_mode():
            self.register_buffer("bend", torch.randn(4))
        self.turn = nn.Parameter(torch.randn(4, dtype=torch.complex64).conj())
        self.minus = nn.Parameter(torch._neg_view(torch.randn(4)))
        self.register_state_dict_post_hook(rename)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale + self.bend * self.turn.imag + self.minus

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 1}


def rename(module: nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
    state[f"{prefix}other"] = state.pop(f"{prefix}gain")


def test_odd_things_in_a_module_stay_as_they_are(tmp_path: Path) -> None:
    torch.manual_seed(4)
    model, x = nn.Sequential(Odd(), Odd()), torch.randn(2, 4)
    with torch.no_grad():
        expected = model(x)
    with loaded(model, on_disk(tmp_path), injection_policy={Odd: ()}) as engine:
        assert engine.stats().blocks_by_home["DISK"] == 2
        for _ in range(2):
            # Not bit by bit: a matrix library may sum a transposed weight in another order than its contiguous copy.
            torch.testing.assert_close(engine(x), expected, rtol=1e-5, atol=1e-5)


def test_its_memory_is_let_go_and_all_is_given_back(batch: Tensors, tmp_path: Path) -> None:
    model = tiny_model("llama", num_layers=3)
    mappings = []
    for parameter in model.parameters():
        mapping = mmap.mmap(-1, parameter.nbytes)
        values = torch.frombuffer(mapping, dtype=parameter.dtype).view(parameter.shape)
        parameter.data = values.copy_(parameter.data)
        mappings.append(weakref.ref(mapping))
        del mapping, values
    del parameter
    expected, before = eager_logits(model, batch), Holdings.now()
    engine = zinfer.init_inference(model, on_disk(tmp_path), device="cpu")
    gc.collect()
    assert [mapping() for mapping in mappings] == [None] * len(mappings)
    assert torch.equal(engine(**batch).logits, expected)
    assert [name for name in own_descriptors() if name.startswith(str(tmp_path))]
    engine.destroy()
    assert Holdings.now() <= before


def test_a_refused_module_keeps_its_weights_and_leaves_nothing(batch: Tensors, tmp_path: Path) -> None:
    model = tiny_model("llama", num_layers=3)
    expected, before = eager_logits(model, batch), Holdings.now()
    with pytest.raises(PlanError) as kept:  # as a prompt keeps the last one, for who wants to look into it
        refused(model, on_disk(tmp_path), max_weight_memory=1)
    assert torch.equal(eager_logits(model, batch), expected)
    assert Holdings.now() <= before
    del kept


def test_a_module_whose_hooks_ctrl_c_has_cut_short_keeps_its_weights(batch: Tensors, tmp_path: Path) -> None:
    model, lines = tiny_model("llama", num_layers=2), count(1)
    expected, code = eager_logits(model, batch), StreamingHooks._put_on.__code__

    def strike(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal left
        if frame.f_code is not code:
            return None
        left -= event == "line"
        if event == "line" and not left:
            signal.raise_signal(signal.SIGINT)
        return strike

    struck, traced = True, sys.gettrace()
    while struck:
        left = num_lines = 4 * next(lines)
        sys.settrace(strike)
        try:
            engine = zinfer.init_inference(model, on_disk(tmp_path), device="cpu")
        except KeyboardInterrupt:
            sys.settrace(traced)
            assert torch.equal(eager_logits(model, batch), expected)
        else:
            struck = False
            engine.destroy()
        finally:
            sys.settrace(traced)
    assert num_lines > 20


def test_a_failed_read_names_the_folder(batch: Tensors, tmp_path: Path) -> None:
    with (
        loaded(tiny_model("llama", num_layers=3), on_disk(tmp_path)) as engine,
        failing_reads(read_error, Fault()),
        pytest.raises(DiskReadError) as failed,
    ):
        engine(**batch)
    assert str(failed.value).startswith(f"{tmp_path}/zinfer-")


def test_two_at_once_under_one_path(batch: Tensors, tmp_path: Path) -> None:
    models = [tiny_model("llama", num_layers=3, seed=seed) for seed in range(2)]
    expected = [eager_logits(model, batch) for model in models]
    with loaded(models[0], on_disk(tmp_path)) as first, loaded(models[1], on_disk(tmp_path)) as second:
        assert torch.equal(second(**batch).logits, expected[1])
        assert torch.equal(first(**batch).logits, expected[0])


@contextmanager
def little_room(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> Iterator[None]:
    class Found:
        f_bavail, f_frsize = num_bytes, 1

    with monkeypatch.context() as patched:
        patched.setattr(os, "fstatvfs", lambda _: Found)
        yield


def test_a_full_disk_names_the_key_and_the_module_keeps_its_weights(
    batch: Tensors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama", num_layers=3)
    expected = eager_logits(model, batch)
    with little_room(monkeypatch, 1000), pytest.raises(ScratchError, match=rf"{KEY}: .*1,000 are free.*make room"):
        refused(model, on_disk(tmp_path))
    write, before = os.pwritev, Holdings.now()

    def fill_up(fd: int, buffers: list[memoryview], offset: int) -> int:
        if offset:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, [buffers[0][:8192]], offset)

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", fill_up)
        with pytest.raises(ScratchError, match=rf"{KEY}: writing .* at byte 8192: No space left .*make room") as kept:
            refused(model, on_disk(tmp_path))
    assert list(tmp_path.iterdir()) == []
    assert Holdings.now() <= before  # though the traceback is there
    del kept
    assert torch.equal(eager_logits(model, batch), expected)


def test_a_path_that_cannot_be_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=rf"{KEY}: .*file cannot be made a folder"):
        refused(tiny_model("llama", num_layers=2), on_disk(tmp_path / "file"))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "section", [{"bits": 8}, {"bits": 4, "group_size": 32, "symmetric": False}, {"format": "fp8"}], ids=str
)
@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_quantized_weights_stream_from_the_disk_too(
    batch: Tensors, device: str, family: str, section: dict[str, object], tmp_path: Path
) -> None:
    """Joined products and transposed matrices among them, by the codes that the same weights have in host memory."""
    tiny = ragged_models.tiny_model if family == "mixtral" else tiny_model
    options: dict[str, Any] = {"device": device, "kernel_inject": True, "quantization": section}
    engine = zinfer.init_inference(tiny(family, num_layers=3), HOST, **options)
    try:
        expected, slabs_bytes = engine(**batch).logits, engine.stats().streamed_bytes_per_pass
    finally:
        engine.destroy()
    engine = zinfer.init_inference(tiny(family, num_layers=3), on_disk(tmp_path), **options)
    try:
        assert engine.stats().blocks_by_home["HOST"] == 0
        assert 0.9 * slabs_bytes < engine.stats().disk_bytes_per_pass <= slabs_bytes
        for _ in range(2):
            assert torch.equal(engine(**batch).logits, expected)
    finally:
        engine.destroy()
    assert list(tmp_path.iterdir()) == []


def test_a_weight_that_cannot_be_quantized_leaves_nothing(batch: Tensors, tmp_path: Path) -> None:
    model = tiny_model("llama", num_layers=3)
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] = float("inf")
    before = Holdings.now()
    with pytest.raises(CheckpointError, match=r"layers\.1: mlp\.up_proj\.weight cannot be quantized: row 3, column 5"):
        refused(model, on_disk(tmp_path), quantization={"bits": 8})
    assert Holdings.now() <= before
    assert model.model.layers[1].mlp.up_proj.weight[3, 5] == float("inf")
    assert list(tmp_path.iterdir()) == []


def test_without_a_path_the_refusal_asks_for_it() -> None:
    """nvme is asked for and cannot be had: placing the weights elsewhere without a word is not what was asked."""
    with pytest.raises(PlanError, match=rf'"nvme", but weights of the module are in memory .*set {KEY}, .*save_pre'):
        refused(tiny_model("llama", num_layers=2), DISK)


def test_a_checkpoint_that_is_named_is_read_where_it_lies(batch: Tensors, tmp_path: Path) -> None:
    tiny_model("llama", num_layers=3).save_pretrained(tmp_path / "saved")
    model, path = tiny_model("llama", num_layers=3, seed=9), tmp_path / "nvme"
    with loaded(model, on_disk(path), checkpoint=str(tmp_path / "saved")) as engine:
        assert torch.equal(engine(**batch).logits, eager_logits(tmp_path / "saved", batch))
        assert [ignored.path for ignored in engine.settings.without_effect] == [KEY]
    assert not path.exists()


def test_a_killed_process_leaves_nothing(tmp_path: Path) -> None:
    ours, theirs = commands.context.Pipe()
    process = commands.context.Process(target=run_until_killed, args=(tmp_path, theirs))
    process.start()
    theirs.close()
    assert ours.recv() == "runs"
    links = [os.readlink(link) for link in Path(f"/proc/{process.pid}/fd").iterdir()]
    assert any(link.startswith(str(tmp_path)) for link in links)
    process.kill()
    process.join()
    assert list(tmp_path.iterdir()) == []


def run_until_killed(nvme_path: Path, test: Connection) -> None:
    """In another process: an engine that says when it has computed."""
    engine = zinfer.init_inference(tiny_model("llama", num_layers=3), on_disk(nvme_path), device="cpu")
    engine(input_ids=torch.tensor([[5, 6]]))
    test.send("runs")
    test.recv()
