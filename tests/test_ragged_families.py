"""Ragged batches over pages against transformers' `generate`, each prompt alone, for every family that runs in them."""

from pathlib import Path

import pytest
import torch
from checkpoints import VOCAB_SIZE
from ragged_models import FAMILIES, Reference, tiny_model

import zinfer
from zinfer.batching.adapters import patch_attention
from zinfer.errors import ConfigError
from zinfer.model.families import INTERFACED, check_family, is_known
from zinfer.model.module_patches import ModulePatches


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
    assert set(INTERFACED) <= {family.split("-")[0] for family in FAMILIES}
    assert all(is_known(family.split("-")[0]) for family in FAMILIES)


def test_a_family_that_is_not_known() -> None:
    model = tiny_model("llama")
    model.config.model_type = "lama"
    with pytest.raises(ConfigError, match=r"a lama model cannot run in ragged batches yet; known are bloom, cohere"):
        patch_attention(model, ModulePatches())


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("gemma3_text", {"use_bidirectional_attention": True}, "see later ones"),
        ("llama", {"layer_types": ["full_attention", "chunked_attention"]}, "layers of the kind chunked_attention"),
        ("bloom", {"slow_but_exact": True, "pretraining_tp": 2}, "slow_but_exact"),
        ("llama", {"rope_parameters": {"rope_type": "longrope"}}, "longrope, which depend on the longest sequence"),
    ],
)
def test_options_that_would_come_out_otherwise(family: str, options: dict[str, object], message: str) -> None:
    model = tiny_model(family)
    check_family(model)
    for name, value in options.items():
        setattr(model.config, name, value)
    with pytest.raises(ConfigError, match=rf"this {family} model .*{message}.*; use zinfer\.init_inference"):
        check_family(model)
