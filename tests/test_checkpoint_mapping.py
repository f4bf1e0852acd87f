"""Checkpoints whose tensors are named and cut otherwise than the module's: experts one by one, older names."""

from pathlib import Path

import pytest
import torch
from checkpoints import write_safetensors
from engines import loaded
from ragged_models import tiny_model
from safetensors.torch import load_file
from transformers import PreTrainedModel
from transformers.core_model_loading import Concatenate, Transpose, WeightConverter
from typer.testing import CliRunner

import zinfer
from zinfer.cli import app
from zinfer.errors import CheckpointError
from zinfer.weights import JoinedTensor, read_header

IDS = torch.arange(2, 32).view(1, 30)
NVME = {"zero_optimization": {"offload_param": {"device": "nvme"}}}


def saved(family: str, folder: Path) -> tuple[PreTrainedModel, dict[str, torch.Tensor]]:
    model = tiny_model(family)
    model.save_pretrained(folder)
    return model, load_file(folder / "model.safetensors")


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_neox"])
def test_logits_and_bytes(family: str, tmp_path: Path) -> None:
    model, tensors = saved(family, tmp_path)
    assert set(tensors) != set(model.state_dict())
    with torch.no_grad():
        wanted = model(IDS).logits
    with loaded(tmp_path, NVME) as engine:
        torch.testing.assert_close(engine(input_ids=IDS).logits, wanted, rtol=1e-4, atol=1e-4)
        stats = engine.stats()
        layers = sum(parameter.nbytes for name, parameter in model.named_parameters() if ".layers." in name)
        assert layers <= stats.disk_bytes_per_pass <= 1.1 * layers


def test_more_experts_than_ten_keep_their_order(tmp_path: Path) -> None:
    model = tiny_model("mixtral")
    config = model.config
    config.num_local_experts = 12
    torch.manual_seed(1)
    model = type(model)(config).eval()
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        wanted = model(IDS).logits
    with loaded(tmp_path) as engine:
        torch.testing.assert_close(engine(input_ids=IDS).logits, wanted, rtol=1e-4, atol=1e-4)


def test_quantized_while_loading_as_in_memory(tmp_path: Path) -> None:
    model, _ = saved("mixtral", tmp_path)
    rules = {"zinfer": {"quantization": {"bits": 8}}}
    with loaded(tmp_path, rules) as engine:
        from_files = engine(input_ids=IDS).logits
    with loaded(model, rules) as engine:  # whose attention is eager: all but the last bits
        torch.testing.assert_close(engine(input_ids=IDS).logits, from_files, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        assert not torch.allclose(tiny_model("mixtral")(IDS).logits, from_files, atol=1e-3)


def test_a_store_and_its_report(tmp_path: Path) -> None:
    saved("mixtral", tmp_path / "model")
    found = CliRunner().invoke(
        app,
        f"quantize --model {tmp_path}/model --output {tmp_path}/store --bits 8 --report {tmp_path}/report.html".split(),
    )
    assert found.exit_code == 0, found.output
    assert "experts.gate_up_proj" in (tmp_path / "report.html").read_text()
    with loaded(tmp_path / "model", {"zinfer": {"quantization": {"bits": 8}}}) as engine:
        wanted = engine(input_ids=IDS).logits
    with loaded(tmp_path / "store", NVME) as engine:
        assert torch.equal(engine(input_ids=IDS).logits, wanted)


def test_pieces_of_three_dimensions(tmp_path: Path) -> None:
    """Convolutions of queries, keys and values that a module has as one (kimi_linear, olmo_hybrid)."""
    tensors = {name: torch.randn(rows, 1, 4) for name, rows in (("q", 8), ("k", 8), ("v", 16))}
    write_safetensors(tmp_path / "model.safetensors", tensors)
    entries = read_header(tmp_path / "model.safetensors").tensors
    pieces = [entries[name] for name in tensors]
    joined = JoinedTensor.of("conv", (32, 1, 4), pieces)
    assert joined is not None
    assert joined.pieces == tuple(pieces)
    for shape in [(33, 1, 4), (16, 2, 4), (32, 4), (128,)]:
        assert JoinedTensor.of("conv", shape, pieces) is None


def test_transposed_experts_are_named(tmp_path: Path) -> None:
    """Qwen3-VL-MoE's are published so, under the module's own names; the remedy that is told works."""
    model, _ = saved("mixtral", tmp_path)
    tensors = {name: value.contiguous() for name, value in model.state_dict().items()}
    transposed = {
        name: value.transpose(1, 2).contiguous() if ".experts." in name else value for name, value in tensors.items()
    }
    write_safetensors(tmp_path / "model.safetensors", transposed)
    with pytest.raises(
        CheckpointError,
        match=r"model\.safetensors: .*experts\.\w+ has shape \[4, .* the transpose of each of .* not read yet. "
        r"Write its tensor\.transpose\(1, 2\)\.contiguous\(\) under the same name",
    ):
        zinfer.init_inference(tmp_path, device="cpu")
    write_safetensors(tmp_path / "model.safetensors", tensors)
    with torch.no_grad(), loaded(tmp_path) as engine:
        torch.testing.assert_close(engine(input_ids=IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-4)


def test_an_expert_that_is_missing(tmp_path: Path) -> None:
    _, tensors = saved("mixtral", tmp_path)
    gone = next(name for name in tensors if name.endswith("layers.1.block_sparse_moe.experts.2.w3.weight"))
    del tensors[gone]
    write_safetensors(tmp_path / "model.safetensors", tensors)
    with pytest.raises(
        CheckpointError,
        match=r"model\.safetensors: .*layers\.1\..*with the 6 others of model\.layers\.1\.mlp\.experts\.gate_up_proj "
        r"it does not make up \[4, 192, 64\]: some are missing.*7 tensors",
    ):
        zinfer.init_inference(tmp_path, device="cpu")


@pytest.mark.parametrize("operation", [Transpose(0, 1), Concatenate(dim=1)])
def test_what_would_change_bytes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: Transpose | Concatenate
) -> None:
    _, tensors = saved("llama", tmp_path)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors["model.layers.0.mlp.up.weight"] = tensors.pop(name)
    write_safetensors(tmp_path / "model.safetensors", tensors)
    rule = WeightConverter("mlp.up.weight", "mlp.up_proj.weight", [operation])
    monkeypatch.setattr("zinfer.model.matching.get_model_conversion_mapping", lambda model: [rule])
    message = rf"mlp\.up\.weight: {name} is made of it by {type(operation).__name__}.* not available yet"
    with pytest.raises(CheckpointError, match=message):
        zinfer.init_inference(tmp_path, device="cpu")
