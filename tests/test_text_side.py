"""Folders of multimodal models run as they are, by their text side: equal tokens, and the other sides are not read."""

import json
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from multimodal_models import CONFIGS, multimodal_model, text_bytes
from safetensors.torch import load_file, save_file
from test_foreign_engine import write_quantized_experts
from test_foreign_fp8 import write_fp8
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
from typer.testing import CliRunner

import zinfer
from zinfer.cli import app
from zinfer.config import resolve_settings
from zinfer.engine.engine import InferenceEngine
from zinfer.errors import CheckpointError, ConfigError
from zinfer.jobs.job import run_job
from zinfer.model.outline import read_outline

PROMPTS = [[5, 6, 7, 8, 9], [10, 11, 12], [3] * 20]
NEW = 8
BATCHED = {"gemma3", "kimi_k25", "llava", "mistral3", "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe"}
"""At least."""


def greedy(model: Any) -> list[list[int]]:
    """What a whole model generates from text alone."""
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        made = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, eos_token_id=None
        )
        found.append(made[0, len(prompt) :].tolist())
    return found


def batched(folder: Path, **options: Any) -> tuple[list[list[int]], int]:
    """Return the tokens of `LLM`, and the bytes that it loaded."""
    params = zinfer.SamplingParams(max_new_tokens=NEW, ignore_eos=True)
    with zinfer.LLM(folder, device="cpu", **options) as llm:
        found = [list(each.token_ids) for each in llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], params)]
        return found, llm.stats().loaded_bytes


def alone(folder: Path, **options: Any) -> tuple[list[list[int]], int]:
    """Return the tokens of the engine of padded batches, and the bytes that it loaded."""
    engine = InferenceEngine(folder, resolve_settings({}, {"device": "cpu", **options}))
    try:
        return greedy(engine), engine.stats().loaded_bytes
    finally:
        engine.destroy()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", CONFIGS)
def test_text_tokens_equal_those_of_the_whole_model_and_no_more_is_read(kind: str, tmp_path: Path) -> None:
    model = multimodal_model(kind, tmp_path)
    wanted, num_bytes = greedy(model), text_bytes(model)
    assert len({token for tokens in wanted for token in tokens}) >= 4
    assert sum(path.stat().st_size for path in tmp_path.glob("*.safetensors")) > 1.1 * num_bytes
    assert alone(tmp_path) == (wanted, num_bytes)
    with nullcontext() if kind in BATCHED else suppress(ConfigError):
        assert batched(tmp_path) == (wanted, num_bytes)
        streamed = {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": str(tmp_path)}}}
        assert batched(tmp_path, config=streamed)[0] == wanted
        planned = [each for block in read_outline(tmp_path).plain_blocks for each in block.layout.tensors]
        assert sum(each.nbytes for each in planned) == num_bytes


@pytest.mark.parametrize("kind", ["gemma3", "gemma4"])
def test_a_job_runs_in_batches_or_padded(kind: str, tmp_path: Path) -> None:
    model = multimodal_model(kind, tmp_path / "model")
    rows = [{"prompt_token_ids": prompt, "max_new_tokens": NEW, "ignore_eos": True} for prompt in PROMPTS]
    (tmp_path / "in.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    run_job(tmp_path / "model", tmp_path / "in.jsonl", tmp_path / "out.jsonl", device="cpu")
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["token_ids"] for row in sorted(found, key=lambda row: int(row["id"]))] == greedy(model)


def test_init_inference_takes_the_whole_model(tmp_path: Path) -> None:
    model = multimodal_model("llava", tmp_path)
    engine = zinfer.init_inference(tmp_path, device="cpu")
    assert type(engine.module).__name__ == "LlavaForConditionalGeneration"
    assert greedy(engine) == greedy(model)
    assert engine.stats().loaded_bytes > 1.1 * text_bytes(model)
    engine.destroy()


def test_a_store_holds_the_text_side_alone(tmp_path: Path) -> None:
    multimodal_model("gemma3", tmp_path / "model")
    words = ["quantize", "--model", str(tmp_path / "model"), "--output", str(tmp_path / "store"), "--device", "cpu"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "store" / "config.json").read_text())["model_type"] == "gemma3_text"
    found, loaded_bytes = batched(tmp_path / "store")
    assert found == batched(tmp_path / "model", quantization={"bits": 8})[0]
    assert loaded_bytes < 0.5 * batched(tmp_path / "model")[1]


def published_kimi(source: Path, folder: Path) -> Path:
    """A DeepSeek-V3 as Kimi-K2.5 is published: names, classes and sections of its own, and another side."""
    folder.mkdir()
    tensors = {f"language_model.{name}": value for name, value in load_file(source / "model.safetensors").items()}
    tensors |= {
        "vision_tower.encoder.blocks.0.wqkv.weight": torch.ones(3, 3),
        "mm_projector.proj.0.bias": torch.ones(3),
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    text = json.loads((source / "config.json").read_text()) | {"model_type": "kimi_k2"}
    config = {"model_type": "kimi_k25", "architectures": ["KimiK25ForConditionalGeneration"], "text_config": text}
    config |= {"dtype": text["dtype"], "vision_config": {"hidden_size": 32}, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_quantized_weights_and_names_that_transformers_lacks(tmp_path: Path) -> None:
    write_fp8(tmp_path / "plain", "deepseek_v3", "blocks")
    wanted = batched(tmp_path / "plain")
    assert batched(published_kimi(tmp_path / "plain", tmp_path / "kimi")) == wanted
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    (tmp_path / "plain" / "config.json").write_text(json.dumps(config | {"model_type": "kimi_k2"}))
    assert batched(tmp_path / "plain") == wanted


def test_experts_in_int4_as_kimi_publishes_them(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = DeepseekV3Config(
        **{"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 64},
        **{"num_hidden_layers": 2, "first_k_dense_replace": 1, "num_attention_heads": 4, "num_key_value_heads": 4},
        **{"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16},
        **{"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    )
    method = "compressed-tensors int4"
    full = write_quantized_experts(tmp_path / "plain", method, DeepseekV3ForCausalLM(config).eval(), 32)
    full.generation_config.eos_token_id = None
    assert batched(published_kimi(tmp_path / "plain", tmp_path / "kimi"))[0] == greedy(full)


def test_a_weight_of_the_text_side_that_is_missing_or_left_over_is_named(tmp_path: Path) -> None:
    multimodal_model("mistral3", tmp_path)
    path = tmp_path / "model.safetensors"
    whole = load_file(path)
    towers = {name for name in whole if not name.startswith("language_model.")}
    text = {name: value for name, value in whole.items() if name not in towers}
    assert towers
    save_file(text, path, {"format": "pt"})
    assert len(batched(tmp_path)[0]) == len(PROMPTS)
    norm = "language_model.model.norm.weight"
    for change, words in (
        ({name: value for name, value in text.items() if name != norm}, "1 weights are missing: model.norm.weight"),
        ({**text, "language_model.model.own.weight": torch.ones(3)}, "1 weights have no place in MistralForCausalLM"),
    ):
        save_file(change, path, {"format": "pt"})
        with pytest.raises(CheckpointError, match=words):
            zinfer.LLM(tmp_path, device="cpu")
