"""Ragged batches over pages against transformers' `generate`, each prompt alone, for every family that runs in them."""

import json
from pathlib import Path
from typing import Final

import pytest
import torch
from checkpoints import VOCAB_SIZE
from ragged_models import FAMILIES, Reference, tiny_model

import zinfer
from zinfer.batching.family_check import check_family
from zinfer.errors import ConfigError
from zinfer.model.families import (
    ADAPTED,
    INTERFACED,
    LIMITED_BY_ROTARY,
    Batching,
    forget_batching,
    recall_batching,
    record_batching,
)
from zinfer.model.outline import read_outline

LONGROPE: Final = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0, 3.0, 4.0, 5.0] * 2,
    "original_max_position_embeddings": 40,
}
DYNAMIC: Final = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}


@pytest.mark.sampled(28)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_each_prompt_alone(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(2, VOCAB_SIZE, (length,), generator=generator).tolist() for length in (1, 9, 40, 200)]
    reference = Reference(model, prompts, num_new=8)
    assert len({token for tokens in reference.tokens for token in tokens}) > 4, "a text that says nothing"
    model.save_pretrained(tmp_path)
    resident = zinfer.init_inference(tmp_path, device="cpu")
    reference.check(resident, chunk=1000, page_size=128)
    reference.check(resident, chunk=64, page_size=16, most_part_tokens=50)
    resident.destroy()
    streamed = zinfer.init_inference(
        tmp_path, {"zero_optimization": {"offload_param": {"device": "nvme"}}}, device="cpu"
    )
    reference.check(streamed, chunk=3, page_size=16)
    passes, read = streamed.stats().passes, streamed.stats().disk_bytes_per_pass
    reference.check(streamed, chunk=7, page_size=1, most_part_tokens=5)
    assert streamed.stats().passes > passes
    assert read > 0
    streamed.destroy()


def test_every_known_family_is_tested() -> None:
    assert {family.split("-")[0] for family in FAMILIES} == INTERFACED | ADAPTED


def test_a_family_of_another_name_is_measured_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    caplog.set_level("INFO")
    model = tiny_model("llama")
    model.config.model_type = "lama"
    assert check_family(model) == check_family(model) == Batching()
    [record] = (tmp_path / "zinfer").glob("family-*.json")
    assert json.loads(record.read_text())["class"] == "LlamaForCausalLM"
    assert caplog.text.count("whether a LlamaForCausalLM runs in ragged batches") == 1


def test_a_damaged_record_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = tiny_model("llama", num_layers=3)
    model.config.model_type = "another lama"
    record_batching(model, Batching("a reason"))
    with pytest.raises(ConfigError, match="a LlamaForCausalLM cannot run in ragged batches: a reason; `zinfer run`"):
        check_family(model)
    [record] = (tmp_path / "zinfer").glob("family-*.json")
    for text in ("", "{}", '{"batching": {"which": 1}}'):
        record.write_text(text)
        forget_batching()
        assert recall_batching(model) is None
    assert "measured again" in caplog.text
    assert check_family(model) == Batching()


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("gemma3_text", {"use_bidirectional_attention": True}, "other logits than each alone, measured"),
        ("gpt_neo", {}, "other logits than each alone, measured"),
        ("llama", {"layer_types": ["linear_attention", "full_attention"]}, "keeps LinearAttention"),
    ],
)
def test_models_that_would_get_other_tokens_are_refused(family: str, options: dict[str, object], message: str) -> None:
    model = tiny_model(family)
    for name, value in options.items():
        setattr(model.config, name, value)
    with pytest.raises(ConfigError, match=f"cannot run in ragged batches: .*{message}.*; `zinfer run` computes it"):
        check_family(model)


@pytest.mark.parametrize(
    ("family", "options", "limit", "source"),
    [
        ("llama", {"rope_parameters": LONGROPE}, 40, LIMITED_BY_ROTARY),
        ("qwen3", {"rope_parameters": DYNAMIC}, 512, LIMITED_BY_ROTARY),
        ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 40}, 40, LIMITED_BY_ROTARY),
        ("llama4_text", {}, 16, "attention_chunk_size"),
        ("deepseek_v32", {}, 20, "index_topk"),
        ("minimax_m3_vl_text", {}, 16 * 3, "index_block_size"),
    ],
)
def test_models_run_up_to_the_length_from_which_on_they_choose(
    family: str, options: dict[str, object], limit: int, source: str, tmp_path: Path
) -> None:
    model = tiny_model(family, **options)
    model.save_pretrained(tmp_path)
    prompts = [[3 + 7 * place % 90 for place in range(num)] for num in (limit - 3, 5, limit)]
    with zinfer.LLM(tmp_path, device="cpu") as llm:
        found = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], max_new_tokens=3)
    for prompt, each in zip(prompts[:2], found, strict=False):
        wanted = model.generate(torch.tensor([prompt]), max_new_tokens=3, do_sample=False, pad_token_id=1)
        assert list(each.token_ids) == wanted[0, len(prompt) :].tolist()
    if source != LIMITED_BY_ROTARY:  # rows may be longer in padded batches
        assert read_outline(tmp_path).max_positions == limit
    assert found[2].error is not None
    assert f"{limit} ({source}" in found[2].error
