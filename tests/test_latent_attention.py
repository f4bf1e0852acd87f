"""DeepSeek's latent attention over pages that hold the latents: their size, codes, quantized weights, and `LLM`."""

from pathlib import Path

import pytest
import torch
from checkpoints import VOCAB_SIZE
from llm_support import by_ids
from ragged_models import tiny_model

import zinfer
from zinfer import LLM, SamplingParams
from zinfer.model.spec import ModelSpec

FAMILIES = ("deepseek_v2", "deepseek_v3")
PROMPTS = [
    torch.randint(2, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (3, 50, 17)
]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_token_leaves_one_latent_and_one_turned_key(family: str) -> None:
    config = tiny_model(family).config
    shape = ModelSpec.read(config).kv
    assert (shape.num_heads, shape.key_dim, shape.value_dim) == (1, 16 + 8, 16)
    assert shape.token_bytes(torch.bfloat16) == config.num_hidden_layers * 24 * 2
    assert shape.token_bytes(torch.int8) == config.num_hidden_layers * (24 + 4)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("home", ["none", "nvme"])
def test_weights_that_are_quantized_are_taken_apart_too(family: str, home: str, tmp_path: Path) -> None:
    """Where a matrix is used in parts, and not as a product of its own."""
    tiny_model(family).save_pretrained(tmp_path)
    config = {
        "zero_optimization": {"offload_param": {"device": home, "nvme_path": str(tmp_path / "store")}},
        "zinfer": {"quantization": {"bits": 8, "group_size": 16}},
    }
    with LLM(tmp_path, config, device="cpu", kv_cache_memory="1MB") as llm:
        found = [each.token_ids for each in llm.generate(by_ids(PROMPTS), SamplingParams(max_new_tokens=8))]
    engine = zinfer.init_inference(tmp_path, config, device="cpu")
    for prompt, token_ids in zip(PROMPTS, found, strict=True):
        alone = engine.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False, pad_token_id=1)
        assert tuple(alone[0, len(prompt) :].tolist()) == token_ids
    engine.destroy()


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
def test_latents_as_codes(kv_cache_dtype: str, tmp_path: Path) -> None:
    tiny_model("deepseek_v3").save_pretrained(tmp_path)
    params = SamplingParams(max_new_tokens=1, logprobs=5)
    with LLM(tmp_path, device="cpu", kv_cache_memory="1MB") as llm:
        exact = llm.generate(by_ids(PROMPTS), params)
    with LLM(tmp_path, device="cpu", kv_cache_memory="1MB", kv_cache_dtype=kv_cache_dtype) as llm:
        found = llm.generate(by_ids(PROMPTS), params)
    for mine, other in zip(found, exact, strict=True):
        assert mine.logprobs is not None
        assert other.logprobs is not None
        assert mine.logprobs[0].chosen == pytest.approx(other.logprobs[0].chosen, abs=0.5)
        assert mine.logprobs[0].chosen != other.logprobs[0].chosen
