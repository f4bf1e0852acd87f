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

from zinfer.config import resolve_settings
from zinfer.config.quantization_rules import Quantization, QuantRule
from zinfer.errors import CheckpointError, PlanError
from zinfer.model.known_models import KNOWN_MODELS, find_known_model, known_config
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


PLANNED = [name for name, known in KNOWN_MODELS.items() if known.config is not None]


@pytest.mark.sampled(26)
@pytest.mark.parametrize("name", PLANNED)
def test_a_published_model_is_planned_with_its_published_size(name: str) -> None:
    known = KNOWN_MODELS[name]
    settings = resolve_settings(None, {} if known.quantization is None else {"quantization": known.quantization})
    outline = read_outline(name, None, known.stored or settings.quantization)
    assert outline.name == name
    least = 0.9 if known.stand_in else 0.995
    assert least <= sum(each.block.layout.numel for each in outline.blocks) / known.parameters / 1e9 <= 1.01
    if known.gigabytes is not None:  # without the layers that guess further tokens, which are not read
        assert (0.88 if known.stand_in else 0.96) <= outline.nbytes / known.gigabytes / 1e9 <= 1.03
    assert len(outline.layers) == known_config(known).get("num_hidden_layers", len(outline.layers))


@pytest.mark.parametrize(
    ("written", "name", "fmt"),
    [
        ("meta-llama/Llama-3.1-70B-Instruct", "llama-3.1-70b", "bf16"),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "llama-3-8b", "bf16"),
        ("meta-llama/Llama-3.3-70B-Instruct", "llama-3.1-70b", "bf16"),
        ("openai/gpt-oss-120b", "gpt-oss-120b", "mxfp4"),
        ("GPT-OSS-20B", "gpt-oss-20b", "mxfp4"),
        ("deepseek-ai/DeepSeek-V3", "deepseek-v3", "fp8"),
        ("deepseek-ai/DeepSeek-R1-0528", "deepseek-v3", "fp8"),
        ("Qwen/Qwen3-235B-A22B", "qwen3-235b-a22b", "bf16"),
        ("Qwen/Qwen3-235B-A22B-Instruct-2507", "qwen3-235b-a22b", "bf16"),
        ("Qwen/Qwen3-235B-A22B-Instruct-2507-FP8", "qwen3-235b-a22b-fp8", "fp8"),
        ("Qwen/Qwen2.5-72B-Instruct-AWQ", "qwen2.5-72b-awq", "awq"),
        ("moonshotai/Kimi-K2-Instruct-0905", "kimi-k2", "fp8"),
        ("zai-org/GLM-4.6", "glm-4.5", "bf16"),
        ("https://huggingface.co/zai-org/GLM-4.6-FP8/tree/main", "glm-4.5-fp8", "fp8"),
    ],
)
def test_a_published_model_is_known_by_the_names_that_people_type(written: str, name: str, fmt: str) -> None:
    known = find_known_model(written)
    assert known is not None
    assert (known.name, known.format) == (name, fmt)
    assert (known.note() is None) == (known.stand_in is None)


@pytest.mark.parametrize("written", ["", "llama", "./llama-3-70b", "/llama-3-70b", "a/b/opt-30b", "opt-30b/"])
def test_other_names_are_no_published_model(written: str) -> None:
    assert find_known_model(written) is None


def test_a_folder_comes_before_a_published_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_config(tmp_path / "opt-30b", SMALL_LLAMA)
    assert len(read_outline("opt-30b").layers) == SMALL_LLAMA["num_hidden_layers"]


@pytest.mark.sampled(5)
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


@pytest.mark.sampled(2)
@pytest.mark.parametrize("rule", [QuantRule(bits=8), QuantRule(bits=4, group_size=128)], ids=str)
def test_a_model_quantized_later_is_the_one_quantized_at_once(tmp_path: Path, rule: QuantRule) -> None:
    outline = outline_of(write_config(tmp_path, SMALL_LLAMA))
    before = [block.block for block in outline.blocks]
    blocks = [block.block for block in outline.quantized(Quantization((rule,))).blocks]
    assert blocks == [block.block for block in read_outline(tmp_path, None, Quantization((rule,))).blocks]
    assert sum(block.nbytes for block in blocks) < outline.nbytes
    assert [block.block for block in read_outline(tmp_path).blocks] == before
