"""Weights under the names of older files, and tied ones under either or both names."""

from pathlib import Path

import pytest
import torch
from checkpoints import tiny_checkpoint
from engines import loaded
from loading_support import DISK, Tensors, batch, changed, check_logits, eager_logits, keep, llama, refused, renamed
from safetensors.torch import load_file
from transformers import LlamaModel

import zinfer
from zinfer.errors import CheckpointError, ConfigError

__all__ = ["batch", "llama"]  # fixtures


def test_gpt2_without_its_prefix_and_with_masks(tmp_path: Path, batch: Tensors) -> None:
    folder = tiny_checkpoint("gpt2", tmp_path / "new", num_layers=3, shards=1)
    expected = eager_logits(folder, batch)

    def age(tensors: Tensors) -> None:
        renamed("transformer.", "")(tensors)
        for layer in range(3):
            tensors[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 128, 128).tril()
            tensors[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)

    old = changed(folder, tmp_path / "old", age)
    assert torch.equal(eager_logits(old, batch), expected)
    check_logits(old, expected, batch)


def test_gpt2_masks_of_bytes_and_booleans(tmp_path: Path, batch: Tensors) -> None:
    folder = tiny_checkpoint("gpt2", tmp_path / "new", num_layers=2, shards=1)

    def age(tensors: Tensors) -> None:
        tensors["transformer.h.0.attn.bias"] = torch.ones(1, 1, 128, 128, dtype=torch.uint8).tril()
        tensors["transformer.h.1.attn.bias"] = torch.ones(1, 1, 128, 128, dtype=torch.bool).tril()

    check_logits(changed(folder, tmp_path / "old", age), eager_logits(folder, batch), batch, DISK)


def test_opt_without_its_prefix(tmp_path: Path, batch: Tensors) -> None:
    folder = tiny_checkpoint("opt", tmp_path / "new", num_layers=3, shards=1)
    expected = eager_logits(folder, batch)
    old = changed(folder, tmp_path / "old", renamed("model.", ""))
    assert "decoder.layers.0.fc1.weight" in load_file(old / "model.safetensors")
    check_logits(old, expected, batch)


def test_llama_with_rotary_frequencies(llama: Path, tmp_path: Path, batch: Tensors) -> None:
    """They are computed; the file's (wrong on purpose) must not be used."""

    def age(tensors: Tensors) -> None:
        for layer in range(4):
            tensors[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = torch.full((8,), 7.0)

    check_logits(changed(llama, tmp_path / "old", age), eager_logits(llama, batch), batch)


def test_a_base_model_alone_lacks_its_head_unless_config_json_names_it(
    llama: Path, tmp_path: Path, batch: Tensors
) -> None:
    def strip(tensors: Tensors) -> None:
        del tensors["lm_head.weight"]
        renamed("model.", "")(tensors)

    base = changed(llama, tmp_path / "base", strip)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        refused(base)
    named = changed(base, tmp_path / "named", keep, architectures=["LlamaModel"])
    with torch.no_grad():
        expected = LlamaModel.from_pretrained(named).eval()(**batch).last_hidden_state
    with loaded(named, DISK) as engine:
        assert torch.equal(engine(**batch).last_hidden_state, expected)
        with pytest.raises(ConfigError, match="a LlamaModel has no such method"):
            engine.generate(**batch)
    with pytest.raises(ConfigError, match="a LlamaModel cannot run in ragged batches: it does not generate"):
        zinfer.LLM(named, device="cpu")


def test_a_base_model_with_a_tied_head_is_whole(tmp_path: Path, batch: Tensors) -> None:
    folder = tiny_checkpoint("llama", tmp_path / "whole", num_layers=2, shards=1, tie=True)
    base = changed(folder, tmp_path / "base", renamed("model.", ""))
    check_logits(base, eager_logits(folder, batch), batch)


def test_a_tied_file_that_holds_the_head_only(tmp_path: Path, batch: Tensors) -> None:
    folder = tiny_checkpoint("llama", tmp_path / "tied", num_layers=2, shards=1, tie=True)
    other = changed(folder, tmp_path / "head", renamed("model.embed_tokens.weight", "lm_head.weight"))
    check_logits(other, eager_logits(folder, batch), batch)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_a_tied_file_that_holds_both_alike(tmp_path: Path, batch: Tensors, family: str) -> None:
    folder = tiny_checkpoint(family, tmp_path / "tied", num_layers=2, shards=1, tie=True)

    def double(tensors: Tensors) -> None:
        [name] = [name for name in tensors if name.endswith(("embed_tokens.weight", "wte.weight"))]
        tensors["lm_head.weight"] = tensors[name].clone()

    check_logits(changed(folder, tmp_path / "both", double), eager_logits(folder, batch), batch)


def test_a_tied_file_that_holds_both_and_they_differ(tmp_path: Path, batch: Tensors) -> None:
    """Each its own, as transformers has it."""
    folder = tiny_checkpoint("llama", tmp_path / "tied", num_layers=2, shards=1, tie=True)
    head = torch.randn(131, 64, generator=torch.Generator().manual_seed(4))
    both = changed(folder, tmp_path / "both", lambda tensors: tensors.update({"lm_head.weight": head}))
    untied = changed(both, tmp_path / "untied", keep, tie_word_embeddings=False)
    expected = eager_logits(untied, batch)
    assert torch.equal(eager_logits(both, batch), expected)
    assert not torch.equal(eager_logits(folder, batch), expected)
    check_logits(both, expected, batch)
