"""Checkpoints that other tools quantized run as they are: what they say is what their codes stand for."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import VOCAB_SIZE, left_padded, random_prompts, tiny_mixtral, tiny_model
from foreign_support import Weights, awq_parts, gptq_parts, packed_parts, plain_parts
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

import zinfer
from zinfer.errors import CheckpointError, PlanError
from zinfer.weights.parameter import QuantizedParameter

GROUP_SIZE = 32
NUM_NEW_TOKENS = 12
FusionGroup = Callable[[Weights], dict[str, torch.Tensor]]

GROUPS = {
    "targets": ["Linear"],
    "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP_SIZE},
}
CHANNELS = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}
METHODS: dict[str, tuple[dict[str, object], int, bool, FusionGroup]] = {
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP_SIZE, "sym": True, "desc_act": False},
        4,
        True,
        lambda weights: gptq_parts(weights, 4, less_one=True),
    ),
    "gptq in activation order": (
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP_SIZE, "sym": False, "desc_act": True},
        4,
        False,
        lambda weights: gptq_parts(weights, 4, less_one=True),
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": GROUP_SIZE, "version": "gemm", "zero_point": True},
        4,
        False,
        awq_parts,
    ),
    "auto-round as gptq": (
        {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4, "group_size": GROUP_SIZE},
        4,
        True,
        lambda weights: gptq_parts(weights, 4, less_one=True),
    ),
    "auto-round as awq": (
        {"quant_method": "auto-round", "packing_format": "auto_round:auto_awq", "bits": 4, "group_size": GROUP_SIZE},
        4,
        False,
        awq_parts,
    ),
    "compressed-tensors int4": (
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": GROUPS}},
        4,
        True,
        lambda weights: packed_parts(weights, 4, symmetric=True),
    ),
    "compressed-tensors int8": (
        {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"group_0": CHANNELS}},
        8,
        True,
        lambda weights: plain_parts(weights, 8, symmetric=True),
    ),
}


def write_quantized(
    folder: Path,
    method: str,
    model: PreTrainedModel | None = None,
    group_size: int = GROUP_SIZE,
    *,
    full: str | None = "lm_head",
) -> PreTrainedModel:
    """A checkpoint in the method's layout; returns transformers' model with the values of its codes.

    ``full``: the linear layer that stays in full precision.
    """
    config, bits, symmetric, pack = METHODS[method]
    config = json.loads(json.dumps(config).replace(f": {GROUP_SIZE}", f": {group_size}"))
    model = model or tiny_model("llama", num_layers=3, tie=False)
    tensors = {name: value.detach().clone() for name, value in model.state_dict().items()}
    for number, (name, module) in enumerate(model.named_modules()):
        if isinstance(module, nn.Linear) and name != full:
            rows, columns = module.weight.shape
            groups = 1 if bits == 8 else columns // group_size
            weights = Weights.random(rows, columns, groups, bits, symmetric, number)
            weights = replace(weights, scales=weights.scales * (1 if bits == 4 else 1 / 16))
            if config.get("desc_act"):
                weights = weights.scattered(number)
            module.weight.data = weights.values(torch.float32).float()
            del tensors[f"{name}.weight"]
            tensors |= {f"{name}.{part}": value for part, value in pack(weights).items()}
    model.config.save_pretrained(folder)
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(text | {"quantization_config": config, "dtype": "float32"}))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return model


@pytest.mark.sampled(2)
@pytest.mark.parametrize("method", METHODS)
def test_text_and_logits_are_those_of_the_codes(method: str, tmp_path: Path, device: str) -> None:
    model = write_quantized(tmp_path, method).to(device)
    ids, mask = left_padded(random_prompts(4, seed=9))
    inputs = {"input_ids": ids, "attention_mask": mask}
    with torch.no_grad():
        on_device = {name: value.to(device) for name, value in inputs.items()}
        logits = model(**on_device).logits
        tokens = model.generate(**on_device, max_new_tokens=NUM_NEW_TOKENS, do_sample=False)
    found = []
    for offload in ("none", "cpu"):
        config = {"zero_optimization": {"offload_param": {"device": offload}}, "zinfer": {"device": device}}
        engine = zinfer.init_inference(tmp_path, config)
        assert (engine.stats().blocks_by_home["HOST"] > 0) == (offload == "cpu")
        if offload == "none":
            assert isinstance(engine.module.model.layers[0].mlp.up_proj.weight, QuantizedParameter)
        found.append(engine(**inputs).logits)
        torch.testing.assert_close(found[-1], logits, rtol=1e-3, atol=1e-3)
        assert torch.equal(engine.generate(**inputs, max_new_tokens=NUM_NEW_TOKENS, do_sample=False), tokens)
        engine.destroy()
    assert torch.equal(found[0], found[1])


def test_they_do_not_stream_from_disk_as_they_are(tmp_path: Path) -> None:
    write_quantized(tmp_path, "gptq")
    config = {"zero_optimization": {"offload_param": {"device": "nvme"}}}
    with pytest.raises(PlanError, match="zinfer quantize"):
        zinfer.init_inference(tmp_path, config, device="cpu")


def test_what_is_not_supported_is_named(tmp_path: Path) -> None:
    write_quantized(tmp_path, "gptq")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["bits"] = 3
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"quantization_config\.bits is 3"):
        zinfer.init_inference(tmp_path, device="cpu")


def tiny_qwen3_moe() -> PreTrainedModel:
    """One layer whose experts' matrices lie in the order of fragments, where their groups are of 64 columns."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        hidden_size=256,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=VOCAB_SIZE,
        num_experts=3,
        num_experts_per_tok=2,
        moe_intermediate_size=256,
        decoder_sparse_step=1,
    )
    model: PreTrainedModel = Qwen3MoeForCausalLM(config).eval()
    return model


def write_quantized_experts(folder: Path, method: str, model: PreTrainedModel, group_size: int) -> PreTrainedModel:
    """A checkpoint whose experts are quantized one by one; returns transformers' model with the values of the codes."""
    quantization, bits, symmetric, pack = METHODS[method]
    quantization = json.loads(json.dumps(quantization).replace(f": {GROUP_SIZE}", f": {group_size}"))
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    values = dict(tensors)
    for number, name in enumerate([name for name in tensors if ".experts." in name]):
        rows, columns = tensors.pop(name).shape
        groups = 1 if bits == 8 else columns // group_size
        weights = Weights.random(rows, columns, groups, bits, symmetric, number)
        weights = replace(weights, scales=weights.scales / 16)
        if quantization.get("desc_act"):
            weights = weights.scattered(number)
        values[name] = weights.values(torch.float32).float()
        tensors |= {f"{name.removesuffix('.weight')}.{part}": value for part, value in pack(weights).items()}
    save_file(values, folder / "model.safetensors", {"format": "pt"})
    full: PreTrainedModel = type(model).from_pretrained(folder, dtype=torch.float32).eval()
    text = json.loads((folder / "config.json").read_text())
    text |= {"quantization_config": quantization, "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(text))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return full


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("make", "group_size"), [(tiny_mixtral, 32), (tiny_qwen3_moe, 64)], ids=["mixtral", "qwen3"])
@pytest.mark.parametrize("method", [method for method in METHODS if "order" not in method])
def test_experts_quantized_one_by_one(
    method: str, make: Callable[[], PreTrainedModel], group_size: int, tmp_path: Path
) -> None:
    """The module has those of all experts in one parameter, which holds just what the codes of each stand for."""
    full = write_quantized_experts(tmp_path, method, make(), group_size)
    ids, mask = left_padded(random_prompts(4, seed=9))
    with torch.no_grad():
        logits = full(input_ids=ids, attention_mask=mask).logits
    engine = zinfer.init_inference(tmp_path, device="cpu")
    for name, values in full.named_parameters():
        if ".experts." in name:
            held = engine.module.get_parameter(name)
            assert isinstance(held, QuantizedParameter)
            format = held.matrix.format
            assert format.in_fragments == (group_size == 64 and format.symmetric and format.bits == 4)
            assert torch.equal(held.dequantized(), values)
    torch.testing.assert_close(engine(input_ids=ids, attention_mask=mask).logits, logits, rtol=1e-3, atol=1e-3)
    engine.destroy()


def test_experts_of_one_scale_each(tmp_path: Path) -> None:
    write_quantized_experts(tmp_path, "compressed-tensors int8", tiny_mixtral(), GROUP_SIZE)
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace('"strategy": "channel"', '"strategy": "tensor"'))
    stored = load_file(tmp_path / "model.safetensors")
    stored |= {name: value[0].clone() for name, value in stored.items() if name.endswith(".weight_scale")}
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    layer = "model.layers.1.block_sparse_moe.experts"

    def values(*leaves: str) -> torch.Tensor:
        names = [f"{layer}.{expert}.{leaf}.weight" for expert in range(4) for leaf in leaves]
        return torch.cat([stored[name] * stored[f"{name}_scale"].float() for name in names])

    engine = zinfer.init_inference(tmp_path, device="cpu")
    held = engine.module.model.layers[1].mlp.experts
    assert torch.equal(held.gate_up_proj.dequantized().flatten(0, 1), values("w1", "w3"))
    assert torch.equal(held.down_proj.dequantized().flatten(0, 1), values("w2"))
    engine.destroy()


def test_experts_in_activation_order_are_named(tmp_path: Path) -> None:
    write_quantized_experts(tmp_path, "gptq in activation order", tiny_mixtral(), GROUP_SIZE)
    with pytest.raises(
        CheckpointError,
        match=r"experts\.0\.w1\.weight: .* experts whose columns are in activation order \(desc_act, actorder\) are "
        r"not read; take the checkpoint in full precision and quantize it with `zinfer quantize` \(24 tensors",
    ):
        zinfer.init_inference(tmp_path, device="cpu")


def test_experts_of_which_some_are_quantized_are_named(tmp_path: Path) -> None:
    write_quantized_experts(tmp_path, "awq", tiny_mixtral(), GROUP_SIZE)
    tensors = load_file(tmp_path / "model.safetensors")
    module = next(name for name in tensors if name.endswith("experts.2.w2.qweight")).removesuffix(".qweight")
    columns, words = tensors[f"{module}.qweight"].shape
    tensors = {name: value for name, value in tensors.items() if not name.startswith(module)}
    tensors[f"{module}.weight"] = torch.zeros(8 * words, columns)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"w2\.weight: .*they are not all quantized alike; take the checkpoint in"
    ):
        zinfer.init_inference(tmp_path, device="cpu")
