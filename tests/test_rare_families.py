"""Families that differ from the others in what their configs state, or in what their forwards do to weights."""

from pathlib import Path

import pytest
import torch
from transformers import (
    OlmoHybridConfig,
    OlmoHybridForCausalLM,
    PreTrainedModel,
    RwkvConfig,
    RwkvForCausalLM,
    XLNetConfig,
    XLNetLMHeadModel,
)

import zinfer

IDS = torch.arange(2, 20).view(1, 18)
HOMES = {home: {"zero_optimization": {"offload_param": {"device": home}}} for home in ("none", "nvme")}


def tiny_xlnet() -> PreTrainedModel:
    """Whose config says -1 where others state their positions."""
    return XLNetLMHeadModel(XLNetConfig(vocab_size=256, d_model=32, n_layer=2, n_head=4, d_inner=48))


def tiny_rwkv() -> PreTrainedModel:
    """Whose first forward divides the weights of each layer but the first, and what passes between layers.

    Loud, so that what layer norms add to the variance makes no difference to halved numbers.
    """
    config = RwkvConfig(vocab_size=256, hidden_size=32, num_hidden_layers=3, context_length=64, rescale_every=1)
    model = RwkvForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith(("attention.output.weight", "feed_forward.value.weight")):
            parameter.data.mul_(100)
    return model


def tiny_olmo_hybrid() -> PreTrainedModel:
    """Whose convolutions of queries, keys and values, tensors of three dimensions, are one in the module."""
    config = OlmoHybridConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=256,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
    )
    return OlmoHybridForCausalLM(config)


MODELS = {"xlnet": tiny_xlnet, "rwkv": tiny_rwkv, "olmo_hybrid": tiny_olmo_hybrid}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("family", MODELS)
def test_logits_and_text(family: str, home: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = MODELS[family]().eval()
    model.save_pretrained(tmp_path)
    engine = zinfer.init_inference(tmp_path, HOMES[home], device="cpu")
    given = engine(input_ids=IDS).logits
    text = engine.generate(input_ids=IDS, max_new_tokens=4, do_sample=False)
    engine.destroy()
    with torch.no_grad():
        torch.testing.assert_close(given, model(IDS).logits, rtol=1e-4, atol=1e-4)
        assert torch.equal(text, model.generate(input_ids=IDS, max_new_tokens=4, do_sample=False))


def logits_of(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(IDS).logits
    return logits


@pytest.mark.parametrize("has_run", [False, True])
def test_rwkv_in_memory(has_run: bool) -> None:
    torch.manual_seed(0)
    model = tiny_rwkv().eval()
    with torch.no_grad():
        expected = logits_of(model) if has_run else None
        engine = zinfer.init_inference(model, {"zero_optimization": {"offload_param": {"device": "cpu"}}}, device="cpu")
        given = engine(input_ids=IDS).logits
    engine.destroy()
    if expected is None:
        torch.manual_seed(0)
        expected = logits_of(tiny_rwkv().eval())
    torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-4)
