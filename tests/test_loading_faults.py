"""What is wrong with a folder, a weight, a config or a model is said, by name."""

import shutil
from pathlib import Path

import pytest
import torch
from loading_support import changed, keep, llama, refused, sharded

from zinfer.errors import CheckpointError, ZinferError

__all__ = ["llama", "sharded"]  # fixtures


def test_a_missing_shard(sharded: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(sharded, tmp_path / "model")
    gone = sorted(folder.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(CheckpointError, match=gone.name):
        refused(folder)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.layers.2.self_attn.o_proj.weight",
        "model.layers.3.input_layernorm.weight",
        "model.norm.weight",
        "lm_head.weight",
    ],
)
def test_a_missing_weight(llama: Path, tmp_path: Path, name: str) -> None:
    folder = changed(llama, tmp_path / "model", lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError) as caught:
        refused(folder)
    assert name in str(caught.value)
    assert str(folder) in str(caught.value)
    assert "missing" in str(caught.value)


def test_a_whole_layer_missing_is_counted(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"9 weights are missing: model\.layers\.4\."):
        refused(changed(llama, tmp_path / "model", keep, num_hidden_layers=5))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "name", ["model.layers.0.mlp.spare.weight", "model.layers.4.mlp.up_proj.weight", "classifier.weight"]
)
def test_an_extra_weight(llama: Path, tmp_path: Path, name: str) -> None:
    folder = changed(llama, tmp_path / "model", lambda tensors: tensors.update({name: torch.ones(3, 4)}))
    with pytest.raises(CheckpointError) as caught:
        refused(folder)
    assert name in str(caught.value)
    assert "model.safetensors" in str(caught.value)


def test_a_bias_that_the_model_has_no_place_for(llama: Path, tmp_path: Path) -> None:
    """attention_bias false in config.json and a bias in the file: computing without it would be silently wrong."""
    name = "model.layers.1.self_attn.q_proj.bias"
    folder = changed(llama, tmp_path / "model", lambda tensors: tensors.update({name: torch.ones(64)}))
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        refused(folder)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("shape", [(64, 64, 1), (64, 32), (32, 64), (4096,), ()])
def test_a_misshapen_weight(llama: Path, tmp_path: Path, shape: tuple[int, ...]) -> None:
    name = "model.layers.1.self_attn.q_proj.weight"
    folder = changed(llama, tmp_path / "model", lambda tensors: tensors.update({name: torch.ones(shape)}))
    with pytest.raises(CheckpointError) as caught:
        refused(folder)
    for part in (name, str(list(shape)), "[64, 64]", "model.safetensors"):
        assert part in str(caught.value)


def test_a_transposed_weight(llama: Path, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    folder = changed(llama, tmp_path / "model", lambda tensors: tensors.update({name: tensors[name].T}))
    with pytest.raises(CheckpointError, match=r"\[64, 128\].*\[128, 64\]"):
        refused(folder)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.uint8, torch.bool, torch.int64])
def test_an_integer_weight(llama: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    name = "model.layers.1.self_attn.q_proj.weight"
    folder = changed(llama, tmp_path / "model", lambda tensors: tensors.update({name: torch.ones(64, 64).to(dtype)}))
    with pytest.raises(CheckpointError) as caught:
        refused(folder)
    assert name in str(caught.value)
    assert str(dtype).removeprefix("torch.") in str(caught.value) or "I" in str(caught.value)


def test_not_a_model_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        refused(tmp_path)
    with pytest.raises(CheckpointError, match="nowhere"):
        refused(tmp_path / "nowhere")


def test_a_file_in_place_of_a_folder(llama: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        refused(llama / "model.safetensors")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("model_type", ["nonesuch", "vit", "t5", "clip"])
def test_an_architecture_without_a_causal_language_model(llama: Path, tmp_path: Path, model_type: str) -> None:
    folder = changed(llama, tmp_path / "model", keep, model_type=model_type, architectures=["Nonesuch"])
    with pytest.raises(CheckpointError, match=r"config\.json: .*transformers") as caught:
        refused(folder)
    assert len(str(caught.value)) < 1000, "not a list of all families"


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": "wide"},
        {"num_hidden_layers": -1},
        {"num_attention_heads": 0},
        {"hidden_act": "nonesuch"},
        {"rope_parameters": {"rope_type": "nonesuch"}},
        {"dtype": "int8"},
        {"dtype": "nonesuch"},
        {"vocab_size": None},
    ],
)
def test_a_config_that_transformers_cannot_build(llama: Path, tmp_path: Path, change: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        refused(changed(llama, tmp_path / "model", keep, **change))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("model", [None, 3, b"model", {"model": 1}], ids=repr)
def test_something_that_is_no_model(model: object) -> None:
    with pytest.raises((ZinferError, TypeError), match="model"):
        refused(model)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("text", ["{", "[1]", "", "\xff", '{"max_new_tokens": -3}'], ids=repr)
def test_a_malformed_generation_config(llama: Path, tmp_path: Path, text: str) -> None:
    folder = shutil.copytree(llama, tmp_path / "model")
    (folder / "generation_config.json").write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError) as caught:
        refused(folder)
    assert str(folder / "generation_config.json") in str(caught.value)
