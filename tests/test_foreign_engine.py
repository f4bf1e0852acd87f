"""Checkpoints that other tools quantized run as they are: what they say is what their codes stand for."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import left_padded, random_prompts, tiny_mixtral, tiny_model
from foreign_support import Weights, awq_parts, gptq_parts, packed_parts, plain_parts
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

import zinfer
from zinfer.errors import CheckpointError, PlanError
from zinfer.quantization.parameter import QuantizedParameter

GROUP_SIZE = 32
NUM_NEW_TOKENS = 12
Pack = Callable[[Weights], dict[str, torch.Tensor]]

GROUPS = {
    "targets": ["Linear"],
    "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP_SIZE},
}
CHANNELS = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}
METHODS: dict[str, tuple[dict[str, object], int, bool, Pack]] = {
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


def write_quantized(folder: Path, method: str) -> PreTrainedModel:
    """A checkpoint in the method's layout; returns transformers' model with the values of its codes."""
    config, bits, symmetric, pack = METHODS[method]
    model = tiny_model("llama", num_layers=3, tie=False)
    tensors = {name: value.detach().clone() for name, value in model.state_dict().items()}
    for number, (name, module) in enumerate(model.named_modules()):
        if isinstance(module, nn.Linear) and name != "lm_head":
            rows, columns = module.weight.shape
            groups = 1 if bits == 8 else columns // GROUP_SIZE
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


@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors int4"])
def test_quantized_experts_are_named(method: str, tmp_path: Path) -> None:
    """Each expert's matrices are quantized for themselves; the module has those of all experts in one parameter."""
    config, bits, symmetric, pack = METHODS[method]
    model = tiny_mixtral()
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for number, name in enumerate([name for name in tensors if ".experts." in name]):
        rows, columns = tensors.pop(name).shape
        weights = Weights.random(rows, columns, columns // GROUP_SIZE, bits, symmetric, number)
        tensors |= {f"{name.removesuffix('.weight')}.{part}": value for part, value in pack(weights).items()}
    text = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(text | {"quantization_config": config}))
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        CheckpointError,
        match=r"experts' weights are quantized one by one \(24 matrices, such as .*\.experts\..*\), and quantized "
        r"experts are not read from this format yet; take .*full precision and quantize it with `zinfer quantize`",
    ):
        zinfer.init_inference(tmp_path, device="cpu")
