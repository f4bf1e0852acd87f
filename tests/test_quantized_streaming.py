"""A quantized model says the same wherever its blocks live: what its rounded weights say, for their packed bytes."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from checkpoints import left_padded, random_prompts, tiny_checkpoint, tiny_mixtral, tiny_model, wide_llama
from engines import distinct_tokens
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

import zinfer
from zinfer.errors import CheckpointError, ConfigError, PlanError
from zinfer.kernels.dequantize import dequantize_ref
from zinfer.kernels.quantize import quantize
from zinfer.kernels.quantized import QuantFormat
from zinfer.weights.parameter import QuantizedParameter

FORMATS = {
    "int8": ({"bits": 8}, QuantFormat(8)),
    "int8 asymmetric groups": ({"bits": 8, "group_size": 32, "symmetric": False}, QuantFormat(8, 32, symmetric=False)),
    "int4 groups": ({"bits": 4, "group_size": 32}, QuantFormat(4, 32)),
    "int4 asymmetric": ({"bits": 4, "group_size": 64, "symmetric": False}, QuantFormat(4, 64, symmetric=False)),
    "fp8": ({"bits": 8, "format": "fp8"}, QuantFormat(8, is_float=True)),
}
NUM_NEW_TOKENS = 12
NUM_LAYERS = 5


@pytest.fixture(scope="module", params=["llama", "opt", "gpt2"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(request.param, tmp_path_factory.mktemp(request.param), num_layers=NUM_LAYERS, shards=2)


@pytest.fixture(scope="module")
def batch() -> dict[str, torch.Tensor]:
    input_ids, attention_mask = left_padded(random_prompts(5, seed=3))
    return {"input_ids": input_ids, "attention_mask": attention_mask}


@contextmanager
def quantized(
    model: Any, section: dict[str, object], homes: str, device: str, num_slots: int = 2
) -> Iterator[zinfer.InferenceEngine]:
    """An engine with quantized layers on the device, or all of them in host memory, or on both."""
    offload = {"resident": "none", "host": "cpu", "mixed": "none"}[homes]
    ours: dict[str, object] = {"quantization": section, "device": device, "num_slots": num_slots}
    config = {"zero_optimization": {"offload_param": {"device": offload}}, "zinfer": ours}
    if homes == "mixed":  # what loading takes leaves room for some layers
        with quantized(model, section, "host", device, num_slots) as engine:
            ours["max_weight_memory"] = engine.plan.device_bytes + 2 * engine.plan.slot_bytes
    engine = zinfer.init_inference(model, config)
    try:
        yield engine
    finally:
        engine.destroy()


@cache
def rounded(folder: Path, format: QuantFormat, device: str) -> PreTrainedModel:
    """transformers' own model, its layers' matrices replaced by what their codes stand for."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    num_replaced = 0
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | Conv1D) and name != "lm_head":
            weight = module.weight.data
            matrix = weight.t() if isinstance(module, Conv1D) else weight
            values = dequantize_ref(quantize(matrix, format))
            module.weight.data = values.t().contiguous() if isinstance(module, Conv1D) else values
            num_replaced += 1
    assert num_replaced >= 4 * NUM_LAYERS
    return model.to(device)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", FORMATS)
def test_text_and_logits_are_those_of_the_rounded_weights(
    folder: Path, batch: dict[str, torch.Tensor], name: str, device: str
) -> None:
    section, format = FORMATS[name]
    model = rounded(folder, format, device)
    inputs = {key: value.to(device) for key, value in batch.items()}
    with torch.no_grad():
        logits = model(**inputs).logits
        tokens = model.generate(**inputs, max_new_tokens=NUM_NEW_TOKENS, do_sample=False)
    assert distinct_tokens(tokens[:, batch["input_ids"].shape[1] :]) >= 4
    with quantized(folder, section, "host", device) as engine:
        torch.testing.assert_close(engine(**batch).logits, logits, rtol=1e-3, atol=1e-3)
        assert torch.equal(engine.generate(**batch, max_new_tokens=NUM_NEW_TOKENS, do_sample=False), tokens)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", FORMATS)
def test_streamed_equals_resident_to_the_bit(
    folder: Path, batch: dict[str, torch.Tensor], name: str, device: str
) -> None:
    section, _ = FORMATS[name]
    with quantized(folder, section, "resident", device) as engine:
        assert engine.stats().streamed_bytes_per_pass == 0
        resident = engine(**batch).logits
        tokens = engine.generate(**batch, max_new_tokens=NUM_NEW_TOKENS, do_sample=False)
    for homes, num_slots in (("host", 2), ("host", 3), ("mixed", 2)):
        with quantized(folder, section, homes, device, num_slots) as engine:
            by_home = engine.stats().blocks_by_home
            assert by_home["HOST"] > 0
            assert (by_home["DEVICE"] > 0) == (homes == "mixed" or by_home["HOST"] < len(engine.plan.homes))
            assert torch.equal(engine(**batch).logits, resident)
            assert torch.equal(engine.generate(**batch, max_new_tokens=NUM_NEW_TOKENS, do_sample=False), tokens)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["int8", "int4 groups"])
def test_a_pass_moves_the_packed_bytes(tmp_path: Path, name: str, device: str) -> None:
    """Codes, and float32 scales, one a row or one a group; norms are in full."""
    folder = wide_llama(tmp_path, NUM_LAYERS)
    section = FORMATS[name][0]
    ids = torch.arange(3, 20).unsqueeze(0)
    with quantized(folder, section, "host", device) as engine:
        before = engine.stats()
        layer = AutoModelForCausalLM.from_pretrained(folder).model.layers[0]
        layer_bits = 0
        for parameter in layer.parameters():
            groups = parameter.numel() // 32 if name == "int4 groups" else parameter.shape[0]
            is_matrix = parameter.dim() == 2
            layer_bits += (
                parameter.numel() * cast(int, section["bits"]) + 32 * groups if is_matrix else parameter.numel() * 32
            )
        assert before.streamed_bytes_per_pass == pytest.approx(NUM_LAYERS * layer_bits / 8, rel=0.002)
        for _ in range(3):
            engine(input_ids=ids)
        if device == "cuda":
            torch.cuda.synchronize()  # a block counts once its copy has arrived
        after = engine.stats()
        moved = after.bytes_to_device - before.bytes_to_device
        ahead = engine.plan.num_slots * engine.plan.slot_bytes
        assert 3 * before.streamed_bytes_per_pass <= moved <= 3 * before.streamed_bytes_per_pass + ahead
        assert after.bytes_read_disk == before.bytes_read_disk


def test_experts_and_a_module_in_memory(device: str, batch: dict[str, torch.Tensor]) -> None:
    logits = []
    for homes in ("resident", "host"):
        model, expected = tiny_mixtral(), tiny_mixtral()
        with quantized(model, {"bits": 8}, homes, device) as engine:
            experts = engine.module.model.layers[0].mlp.experts
            if homes == "resident":
                assert isinstance(experts.gate_up_proj, QuantizedParameter)
                assert isinstance(engine.module.model.layers[0].mlp.gate.weight, nn.Parameter)
                assert not isinstance(engine.module.model.layers[0].mlp.gate.weight, QuantizedParameter)
            logits.append(engine(**batch).logits)
        with torch.no_grad():
            full = expected.to(device)(**{name: value.to(device) for name, value in batch.items()}).logits
        error = (logits[-1] - full).norm() / full.norm()
        assert 0 < error < 0.2
    assert torch.equal(logits[0], logits[1])


def test_weights_that_are_quantized_while_loading_cannot_stay_on_disk(folder: Path) -> None:
    config = {"zero_optimization": {"offload_param": {"device": "nvme"}}, "zinfer": {"quantization": {"bits": 8}}}
    with pytest.raises(PlanError, match=r"quantized while they are loaded.*zinfer quantize"):
        zinfer.init_inference(folder, config, device="cpu")


def test_a_weight_that_no_scale_covers_is_named(tmp_path: Path) -> None:
    model = tiny_model("llama", num_layers=2)
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] = float("inf")
    model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"layers\.1: mlp\.up_proj\.weight cannot be quantized: row 3, column 5"):
        zinfer.init_inference(tmp_path, {"zinfer": {"quantization": {"bits": 4, "group_size": 32}, "device": "cpu"}})


@pytest.mark.sampled(3)
def test_groups_that_do_not_divide_and_patterns_without_a_match_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="48"):
        zinfer.init_inference(folder, {"zinfer": {"quantization": {"bits": 4, "group_size": 48}, "device": "cpu"}})
    section = {"bits": 4, "exclude": ["no_such_module"]}
    with pytest.raises(ConfigError, match="no_such_module"):
        zinfer.init_inference(folder, {"zinfer": {"quantization": section, "device": "cpu"}})


def test_a_pattern_of_deepspeed_without_a_match_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    formats = {name: {"num_bits": 8, "group_size": 32} for name in ("up_proj", "fc1")}
    config = {"weight_quantization": {"post_init_quant": formats}, "zinfer": {"device": "cpu"}}
    engine = zinfer.init_inference(tiny_checkpoint("llama", tmp_path), config)
    try:
        mlp = engine.layers[0].mlp
        assert isinstance(mlp.up_proj.weight, QuantizedParameter)
        assert not isinstance(mlp.down_proj.weight, QuantizedParameter)
    finally:
        engine.destroy()
    (line,) = [each.getMessage() for each in caplog.records if "post_init_quant" in each.getMessage()]
    assert line.startswith("post_init_quant: the pattern 'fc1' occurs in no parameter of this model, whose names are ")
    assert line.endswith("; nothing is quantized by it")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("home", ["none", "cpu", "nvme"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_rows_share_scales_under_group_dim_0(name: str, home: str, tmp_path: Path) -> None:
    """GPT-2 holds its matrices transposed, so that their rows are neighbours in memory."""
    model, format = tiny_model(name, num_layers=2), QuantFormat(4, 32, symmetric=False)
    expected = {key: value.clone() for key, value in model.state_dict().items()}
    matrices = [key for key in expected if ".mlp." in key and key.endswith(".weight")]
    for key in matrices:
        is_turned = name == "gpt2"
        rows = expected[key].T if is_turned else expected[key]
        values = dequantize_ref(quantize(rows.T.contiguous(), format)).T
        expected[key] = values.T if is_turned else values
    groups = {"num_bits": 4, "group_size": 32, "group_dim": 0, "symmetric": False}
    offload = {"device": home} | ({"nvme_path": str(tmp_path)} if home == "nvme" else {})
    config = {
        "weight_quantization": {"post_init_quant": {"mlp": groups}},
        "zero_optimization": {"offload_param": offload},
        "zinfer": {"device": "cpu"},
    }
    reference = tiny_model(name, num_layers=2)
    reference.load_state_dict(expected)
    engine = zinfer.init_inference(model, config)
    try:
        state = engine.module.state_dict()
        assert len(matrices) >= 4
        assert all(torch.equal(state[key], expected[key]) for key in matrices)
        ids = torch.tensor([[5, 6, 7]])
        with torch.no_grad():
            torch.testing.assert_close(engine(ids).logits, reference.eval()(ids).logits)
    finally:
        engine.destroy()


@pytest.mark.sampled(3)
def test_what_group_dim_0_cannot_be_is_said(folder: Path, tmp_path: Path) -> None:
    def section(**more: object) -> dict[str, Any]:
        return {"quantized_initialization": {"num_bits": 8, "group_dim": 0} | more}

    with pytest.raises(ConfigError, match=r"group_size = 48 does not divide the \d+ rows of "):
        zinfer.init_inference(folder, {"weight_quantization": section(group_size=48), "zinfer": {"device": "cpu"}})
    with pytest.raises(ConfigError, match=r"q_groups = 4 contradicts group_dim = 0: it cuts a matrix row after row"):
        zinfer.init_inference(folder, {"weight_quantization": section(), "quant": {"q_groups": 4}})
    with pytest.raises(
        ConfigError, match=r"activations.* contradicts .*group_dim = 0.* without group_size or group_dim"
    ):
        zinfer.init_inference(
            folder, {"weight_quantization": section(), "zinfer": {"quantization": {"activations": True}}}
        )
    offload = {"device": "nvme", "nvme_path": str(tmp_path / "store")}
    config = {"weight_quantization": section(), "zero_optimization": {"offload_param": offload}}
    with pytest.raises(
        ConfigError, match=r"group_dim = 0: weights whose rows share scales are not written to a folder"
    ):
        zinfer.init_inference(folder, config, device="cpu")
    with pytest.raises(ConfigError, match=r"group_dim = 0: .*experts.* holds several matrices"):
        zinfer.init_inference(tiny_mixtral(), {"weight_quantization": section()}, device="cpu")
