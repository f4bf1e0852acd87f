"""Outlines: a config alone gives the same blocks as the checkpoint that it describes."""

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from checkpoints import FAMILIES, tiny_checkpoint
from plan_support import CONFIGS, NUM_PARAMS, SMALL_LLAMA, outline_of, write_config

from zinfer.config.quantization_rules import Quantization, QuantRule
from zinfer.errors import CheckpointError, PlanError
from zinfer.model.known_models import KNOWN_MODELS
from zinfer.model.outline import Outline, read_outline
from zinfer.offload.block import Block


def config_alone(checkpoint: Path, folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    return folder


def sizes(outline: Outline) -> list[tuple[str, int, int, int, bool]]:
    return [
        (each.block.name, each.block.nbytes, each.block.layout.numel, len(each.sites), each.is_layer)
        for each in outline.blocks
    ]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_alone_gives_the_blocks_of_the_checkpoint(family: str, tie: bool, tmp_path: Path) -> None:
    folder = tiny_checkpoint(family, tmp_path / "whole", tie=tie)
    whole, alone = read_outline(folder), read_outline(config_alone(folder, tmp_path / "alone"))
    assert sizes(alone) == sizes(whole)
    assert replace(alone, name="", blocks=(), files=()) == replace(whole, name="", blocks=(), files=())
    assert len(whole.files) >= 2
    assert alone.files == ()
    assert len(alone.layers) == 5


def extents_of(blocks: list[Block]) -> Iterator[tuple[int, int]]:
    for block in blocks:
        yield from ((extent.offset, extent.nbytes) for extent in block.extents)


@pytest.mark.parametrize("tie", [True, False])
def test_made_up_places_lie_end_to_end_in_one_file(tie: bool, tmp_path: Path) -> None:
    folder = config_alone(tiny_checkpoint("opt", tmp_path / "whole", tie=tie), tmp_path / "alone")
    outline = read_outline(folder)
    blocks = [each.block for each in outline.blocks]
    assert {extent.file for block in blocks for extent in block.extents} == {folder / "model.safetensors"}
    places = sorted(extents_of(blocks))
    for (offset, nbytes), (following, _) in pairwise(places):
        assert offset + nbytes == following
    assert sum(nbytes for _, nbytes in places) == 4 * sum(block.layout.numel for block in blocks)


def test_a_stated_dtype_decides_how_wide_weights_are(tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama", tmp_path / "whole")
    alone = config_alone(folder, tmp_path / "alone")
    assert read_outline(alone, torch.bfloat16).nbytes == read_outline(folder, torch.bfloat16).nbytes
    assert 1.9 < read_outline(alone).nbytes / read_outline(alone, torch.bfloat16).nbytes <= 2.0


@pytest.mark.parametrize(
    ("name", "billions"),
    [("llama-3-8b", 8.03), ("opt-30b", 30), ("opt-66b", 66), ("qwen3-235b-a22b", 235.1), ("deepseek-v3", 671.0)],
)
def test_a_published_model_is_known_by_its_name(name: str, billions: float) -> None:
    outline = read_outline(name)
    assert outline.name == name
    assert sum(each.block.layout.numel for each in outline.blocks) == pytest.approx(billions * 1e9, rel=0.01)
    assert len(outline.layers) == KNOWN_MODELS[name]["num_hidden_layers"]


def test_a_folder_comes_before_a_published_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_config(tmp_path / "opt-30b", SMALL_LLAMA)
    assert len(read_outline("opt-30b").layers) == SMALL_LLAMA["num_hidden_layers"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CONFIGS)
def test_large_models_have_their_published_number_of_parameters(name: str, tmp_path: Path) -> None:
    outline = read_outline(write_config(tmp_path, CONFIGS[name]))
    assert sum(each.block.layout.numel for each in outline.blocks) == NUM_PARAMS[name]
    assert outline.nbytes == pytest.approx(2 * NUM_PARAMS[name], rel=1e-6)


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing")
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        read_outline(tmp_path)


def test_a_config_without_a_dtype_needs_one_stated(tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama", tmp_path / "whole")
    config = json.loads((folder / "config.json").read_text())
    del config["dtype"]
    alone = write_config(tmp_path / "alone", config)
    with pytest.raises(CheckpointError, match=r"config\.json: states no dtype"):
        read_outline(alone)
    assert read_outline(alone, torch.float16).dtype == torch.float16


def test_a_damaged_config_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": ')
    with pytest.raises(CheckpointError, match=r"config\.json: at byte 15 not valid JSON"):
        read_outline(tmp_path)


def test_a_state_of_unknown_size_is_refused(tmp_path: Path) -> None:
    config = {
        "model_type": "qwen3_next",
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts": 4,
        "vocab_size": 99,
        "torch_dtype": "bfloat16",
    }
    with pytest.raises(PlanError, match="qwen3_next model keeps LinearAttentionLayer in its cache"):
        read_outline(write_config(tmp_path, config))


@pytest.mark.parametrize("rule", [QuantRule(bits=8), QuantRule(bits=4, group_size=128)], ids=str)
def test_a_model_quantized_later_is_the_one_quantized_at_once(tmp_path: Path, rule: QuantRule) -> None:
    outline = outline_of(write_config(tmp_path, SMALL_LLAMA))
    before = [block.block for block in outline.blocks]
    blocks = [block.block for block in outline.quantized(Quantization((rule,))).blocks]
    assert blocks == [block.block for block in read_outline(tmp_path, None, Quantization((rule,))).blocks]
    assert sum(block.nbytes for block in blocks) < outline.nbytes
    assert [block.block for block in read_outline(tmp_path).blocks] == before
