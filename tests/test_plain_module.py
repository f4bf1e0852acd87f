"""A module that is none of transformers' streams too, by repeated modules or those that `injection_policy` names."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import HIDDEN_SIZE, tiny_model
from engines import loaded
from loading_support import DISK, HOST, refused
from plain_models import NUM_BLOCKS, VOCAB_SIZE, WIDTH, Block, Decoder, tiny_decoder, tiny_encoder
from safetensors.torch import save_file, save_model
from torch import nn

from zinfer import LLM, OnDevice
from zinfer.errors import CheckpointError, ConfigError, LengthError, PlanError

IDS = torch.randint(VOCAB_SIZE, (3, 11), generator=torch.Generator().manual_seed(4))
POLICY: dict[Any, Any] = {Block: ("attn.out_proj", "mlp.fc2")}
BLOCK_BYTES = 51_456
SMALL: dict[str, object] = {"zinfer": {"max_weight_memory": 2 * BLOCK_BYTES + 20_000}}


def logits_of(model: nn.Module, **kwargs: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(IDS, **kwargs)
    return logits


@pytest.mark.sampled(3)
@pytest.mark.parametrize("config", [{}, HOST, HOST | SMALL], ids=["free", "host", "small"])
@pytest.mark.parametrize("policy", [POLICY, {Block: "attn.out_proj"}, {"Block": ()}], ids=["class", "text", "name"])
def test_a_plain_module_streams_its_blocks(config: dict[str, object], policy: dict[Any, Any]) -> None:
    model = tiny_decoder()
    expected = logits_of(model)
    with loaded(model, config, injection_policy=policy) as engine:
        assert engine.module is model
        assert list(engine.named_layers) == [f"blocks.{index}" for index in range(NUM_BLOCKS)]
        for _ in range(2):
            assert torch.equal(logits_of(engine), expected)
        stats = engine.stats()
        if config:
            assert stats.blocks_by_home["HOST"] == NUM_BLOCKS
            assert stats.streamed_bytes_per_pass == NUM_BLOCKS * BLOCK_BYTES
            assert all(parameter.is_meta for parameter in model.blocks.parameters())
        assert not model.positions.is_meta, "in use all through a pass"


def test_blocks_that_a_pass_leaves_out_and_its_keyword_arguments() -> None:
    model = tiny_decoder()
    expected = [logits_of(model, skip=skip) for skip in (None, 2, 0)]
    assert not torch.equal(expected[0], expected[1])
    with loaded(model, HOST, injection_policy=POLICY) as engine:
        for skip, each in zip((None, 2, 0), expected, strict=True):
            assert torch.equal(logits_of(engine, skip=skip), each)


def test_torchs_own_encoder() -> None:
    model, hidden = tiny_encoder(), torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(hidden, is_causal=False)
    with loaded(
        model, HOST, injection_policy={nn.TransformerEncoderLayer: ("self_attn.out_proj", "linear2")}
    ) as engine:
        assert engine.stats().blocks_by_home["HOST"] == NUM_BLOCKS
        torch.testing.assert_close(engine(hidden, is_causal=False), expected, rtol=1e-5, atol=1e-5)


def test_in_another_dtype_quantized_and_with_kernels() -> None:
    expected = logits_of(tiny_decoder().to(torch.bfloat16))
    with loaded(tiny_decoder(), HOST, injection_policy=POLICY, dtype="bf16", kernel_inject=True) as engine:
        assert engine(IDS).dtype is torch.bfloat16
        torch.testing.assert_close(engine(IDS), expected, rtol=0.05, atol=0.3)
    full = logits_of(tiny_decoder())
    with loaded(tiny_decoder(), HOST, injection_policy=POLICY, dtype="int8") as engine:
        assert engine.stats().streamed_bytes_per_pass < NUM_BLOCKS * BLOCK_BYTES / 2
        assert 0 < (engine(IDS) - full).abs().mean() < 0.05 * full.abs().mean()


def test_blocks_are_found_where_none_are_named() -> None:
    model = tiny_decoder()
    expected = logits_of(model)
    with loaded(model, HOST) as engine:
        assert list(engine.named_layers) == [f"blocks.{index}" for index in range(NUM_BLOCKS)]
        assert engine.stats().streamed_bytes_per_pass == NUM_BLOCKS * BLOCK_BYTES
        for _ in range(2):
            assert torch.equal(logits_of(engine), expected)


class Nested(nn.Module):
    """Blocks of two classes beside a single one, in a list; lists of lists, and lists within blocks."""

    def __init__(self) -> None:
        super().__init__()
        attention, mlp, single = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.LayerNorm(4)
        self.layers = nn.ModuleList([attention, mlp, nn.Tanh(), nn.Linear(4, 4), deepcopy(mlp), nn.Tanh(), single])
        self.pairs = nn.ModuleList(nn.ModuleList([nn.Linear(4, 4), nn.ReLU()]) for _ in range(2))
        self.tail = nn.Sequential(nn.Bilinear(4, 4, 4), nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        for linear, gate in self.pairs:
            x = gate(linear(x))
        return self.tail[1](self.tail[0](x, x))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("make", "found"),
    [
        (Nested, ["layers.0", "layers.1", "layers.3", "layers.4"]),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), ["0", "2"]),
        (lambda: nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2))), ["0", "1"]),
    ],
    ids=["nested", "sequence", "sequences"],
)
def test_the_outermost_repeated_modules_are_blocks(make: Callable[[], nn.Module], found: list[str]) -> None:
    torch.manual_seed(2)
    model, x = make(), torch.randn(3, 4)
    with torch.no_grad():
        expected = model(x)
    with loaded(model, HOST) as engine:
        assert list(engine.named_layers) == found
        assert torch.equal(engine(x), expected)


def a_decoder_layer() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    model, hidden = tiny_model("llama", num_layers=1), torch.randn(2, 5, HIDDEN_SIZE)
    angles = model.model.rotary_emb(hidden, torch.arange(5)[None])
    return model.model.layers[0], (hidden,), {"position_embeddings": angles}


LAYERS: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]] = {
    "llama": a_decoder_layer,
    "gpt2": lambda: (tiny_model("gpt2", num_layers=1).transformer.h[0], (torch.randn(2, 5, HIDDEN_SIZE),), {}),
    "torch": lambda: (nn.TransformerEncoderLayer(32, 4, batch_first=True), (torch.randn(2, 5, 32),), {}),
    "linear": lambda: (nn.Linear(32, 16), (torch.randn(2, 32),), {}),
    "sequence": lambda: (nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.ReLU()), (torch.randn(2, 3),), {}),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("config", [{}, HOST, {"replace_with_kernel_inject": True}], ids=["free", "host", "kernels"])
@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_a_single_layer_stays_on_the_device(make: Any, config: Any, caplog: pytest.LogCaptureFixture) -> None:
    layer, args, kwargs = make()
    with torch.no_grad():
        expected = layer.eval()(*args, **kwargs)
    with loaded(layer, config) as engine:
        homes = engine.stats().blocks_by_home
        assert homes["DEVICE"] > 0 == homes["HOST"]
        assert engine.named_layers == {}
        torch.testing.assert_close(engine(*args, **kwargs), expected, rtol=1e-5, atol=1e-5)
    assert f"a {type(layer).__name__} repeats a class of modules that could stream as blocks" in caplog.text
    assert "injection_policy={Block: ()}" in caplog.text


def test_an_engine_is_no_model() -> None:
    words = "model: is an engine already, whose weights stream; call it as it is"
    with loaded(tiny_decoder(), HOST) as engine, pytest.raises(ConfigError, match=words):
        refused(engine)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({nn.GRU: ("fc2",)}, r"no module of Decoder is a GRU; its modules are Attention, Block, "),
        ({"Blok": ()}, r"no module of Decoder is a Blok"),
        ({Block: ("attn.outproj",)}, r"injection_policy\.Block: 'attn\.outproj' is the end of no .* attn\.out_proj, "),
        ({Decoder: ()}, "Decoder is the model itself; name the class of the blocks in it"),
        ({int: ("a",)}, r"injection_policy = .*: expected an object like \{Block: "),
        ({Block: 3}, "expected an object like"),
        ([Block], "expected an object like"),
    ],
)
def test_a_policy_of_another_model(policy: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        refused(tiny_decoder(), injection_policy=policy)


def test_what_a_plain_module_lacks_is_said() -> None:
    with loaded(tiny_decoder(), injection_policy=POLICY) as engine:
        with pytest.raises(ConfigError, match="generate: a Decoder has no such method"):
            engine.generate(IDS)
        with pytest.raises(ConfigError, match="predict: a Decoder has no transformers config"):
            engine.predict(1, 2, 3)
        with pytest.raises(AttributeError, match="'Decoder' object has no attribute 'config'"):
            engine.config  # noqa: B018
    with pytest.raises(ConfigError, match=r"zinfer\.batch_size: a Decoder has no transformers config"):
        refused(tiny_decoder(), injection_policy=POLICY, batch_size=1, prompt_len=2, new_tokens=3)
    with pytest.raises(ConfigError, match="a Decoder is not a transformers model"):
        LLM(tiny_decoder(), device="cpu", injection_policy=POLICY)
    with pytest.raises(PlanError, match=r"nvme.*memory"):
        refused(tiny_decoder(), DISK, injection_policy=POLICY)
    with pytest.raises(ConfigError, match=r"is on the meta device; say where its weights are"):
        refused(tiny_decoder().to("meta"), injection_policy=POLICY)


def test_max_out_tokens_holds() -> None:
    with loaded(tiny_decoder(), injection_policy=POLICY, max_out_tokens=10) as engine:
        with pytest.raises(LengthError, match=r"11 tokens are more than 10 \(max_out_tokens\)"):
            engine(IDS)
        assert engine(IDS[:, :10]).shape == (3, 10, VOCAB_SIZE)


@pytest.fixture(scope="module")
def listed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("plain") / "weights.safetensors"
    save_file(tiny_decoder().state_dict(), path)
    return {"type": "ds_model", "checkpoints": [str(path)], "version": 1.0}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("config", [{}, HOST, DISK, DISK | SMALL], ids=["free", "host", "disk", "small"])
def test_an_empty_plain_module_with_its_checkpoint(config: dict[str, object], listed: dict[str, Any]) -> None:
    with OnDevice(torch.float32, device="meta"):
        model = Decoder()
    with loaded(model, config, injection_policy=POLICY, checkpoint=listed) as engine:
        for _ in range(2):
            assert torch.equal(logits_of(engine), logits_of(tiny_decoder()))
        if "zero_optimization" in config:
            home = "HOST" if config is HOST else "DISK"
            assert engine.stats().blocks_by_home[home] == NUM_BLOCKS
            weights_bytes = sum(weight.nbytes for weight in Block().parameters())
            assert engine.stats().disk_bytes_per_pass == (NUM_BLOCKS * weights_bytes if home == "DISK" else 0)


def test_an_empty_plain_module_with_a_folder_of_weights_alone(tmp_path: Path) -> None:
    weights = tiny_decoder().state_dict()
    names = sorted(weights)
    for number, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :])):
        save_file({name: weights[name] for name in part}, tmp_path / f"part-{number}.safetensors")
    with OnDevice(torch.float32, device="meta"):
        model = Decoder()
    with loaded(model, DISK, injection_policy=POLICY, checkpoint=tmp_path) as engine:
        assert torch.equal(logits_of(engine), logits_of(tiny_decoder()))
        assert engine.stats().blocks_by_home["DISK"] == NUM_BLOCKS
    with pytest.raises(CheckpointError, match="nowhere"), OnDevice(torch.float32, device="meta"):
        refused(Decoder(), injection_policy=POLICY, checkpoint=tmp_path / "nowhere")


def test_tied_weights_of_an_empty_plain_module(tmp_path: Path) -> None:
    def tied(model: Decoder) -> Decoder:
        model.head = nn.Linear(WIDTH, VOCAB_SIZE, bias=False)
        model.head.weight = model.embed.weight
        return model

    model = tied(tiny_decoder())
    save_model(model, str(tmp_path / "weights.safetensors"))
    members = {"type": "ds_model", "checkpoints": ["weights.safetensors"], "version": 1.0}
    expected = logits_of(model)
    with OnDevice(torch.float32, device="meta"):
        model = tied(Decoder())
    with loaded(model, DISK, injection_policy=POLICY, checkpoint=members, base_dir=tmp_path) as engine:
        assert engine.module.head.weight is engine.module.embed.weight
        assert torch.equal(logits_of(engine), expected)


def test_what_a_plain_modules_checkpoint_must_hold(listed: dict[str, Any]) -> None:
    wide = nn.Sequential(Block(), nn.Linear(4, 4))
    with pytest.raises(CheckpointError, match=r"weights are missing: 0\.scale"):
        refused(wide, injection_policy=POLICY, checkpoint=listed)
    smaller = tiny_decoder()
    smaller.blocks = smaller.blocks[:2]
    with pytest.raises(CheckpointError, match=r"weights have no place in Decoder: blocks\.2\."):
        refused(smaller, injection_policy=POLICY, checkpoint=listed)
    lost = tiny_decoder()
    lost.register_buffer("scratch", torch.empty(3, device="meta"), persistent=False)
    with pytest.raises(ConfigError, match="the buffer scratch is on the meta device and in no checkpoint"):
        refused(lost, injection_policy=POLICY, checkpoint=listed)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("is_empty", [False, True], ids=["memory", "checkpoint"])
def test_a_block_that_is_used_several_times_in_a_pass(is_empty: bool, tmp_path: Path) -> None:
    def recurrent(model: Decoder) -> Decoder:
        first, second, *_ = model.blocks
        model.blocks = nn.ModuleList([first, first, second, first, second])
        return model

    model = recurrent(tiny_decoder())
    expected = logits_of(model)
    more: dict[str, Any] = {}
    if is_empty:
        save_model(model, str(tmp_path / "weights.safetensors"))
        more["checkpoint"] = {"type": "ds_model", "checkpoints": [str(tmp_path / "weights.safetensors")]}
        with OnDevice(torch.float32, device="meta"):
            model = recurrent(Decoder())
    with loaded(model, DISK if is_empty else HOST, injection_policy=POLICY, **more) as engine:
        assert len(engine.layers) == 2
        for _ in range(3):
            assert torch.equal(logits_of(engine), expected)
