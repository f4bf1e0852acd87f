"""Numbers that are not finite: which layer made them first is said, by `LLM` of itself and by an engine if asked."""

import re
from pathlib import Path
from typing import Any

import pytest
import ragged_models
import torch
from family_models import family_inputs, family_model, forward_inputs
from llm_support import by_ids, folder
from plain_models import Block, tiny_decoder
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LogitsProcessorList,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from zinfer import LLM, InferenceEngine, SamplingParams, init_inference
from zinfer.engine.finite_check import AFTER
from zinfer.errors import NonFiniteError

__all__ = ["folder"]  # fixture


def num_hooks(engine: InferenceEngine) -> int:
    return sum(len(layer._forward_hooks) + len(layer._forward_pre_hooks) for layer in engine.layers)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("home", ["none", "nvme"])
@pytest.mark.parametrize("place", [0, 2])
def test_the_layer_that_broke_a_text_is_named(place: int, home: str, folder: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.model.layers[place].mlp.down_proj.weight.data[5, 5] = float("inf")
    model.save_pretrained(tmp_path)
    config = {"zero_optimization": {"offload_param": {"device": home}}}
    with LLM(tmp_path, config, device="cpu", kv_cache_memory="1MB") as llm:
        hooks = num_hooks(llm._model)
        for _ in range(2):
            found = llm.generate(by_ids([[3, 4, 5], [6, 7]]), SamplingParams(max_new_tokens=2))
            assert [each.finish_reason for each in found] == ["error"] * 2
            for each in found:
                assert str(each.error).endswith(f"the first non-finite numbers come from model.layers.{place}")
            assert num_hooks(llm._model) == hooks, "nobody looks any more"


def test_what_comes_before_the_layers_is_told_apart(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.model.embed_tokens.weight.data[7] = float("nan")
    with LLM(model, device="cpu", kv_cache_memory="1MB") as llm:
        good, bad = llm.generate(by_ids([[3, 4, 5], [6, 7]]), SamplingParams(max_new_tokens=2))
    assert good.error is None
    assert str(bad.error).endswith("come from what comes before the first layer")


def test_what_comes_after_the_layers_broke_a_text(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.lm_head.weight.data[7] = float("nan")
    with LLM(model, device="cpu", kv_cache_memory="1MB") as llm:
        (bad,) = llm.generate(by_ids([[3, 4, 5]]), SamplingParams(max_new_tokens=2))
    assert str(bad.error).endswith(f"the first non-finite numbers come from {AFTER}")


def test_an_engine_names_the_layer_where_it_is_asked_to_look(folder: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.model.layers[1].input_layernorm.weight.data[3] = float("nan")
    model.save_pretrained(tmp_path)
    ids = torch.tensor([[3, 4, 5]])
    quiet = init_inference(tmp_path, device="cpu")
    assert quiet.forward(input_ids=ids).logits.isnan().any(), "a forward is looked at only if that is asked for"
    quiet.destroy()
    engine = init_inference(tmp_path, device="cpu", check_finite=True)
    for call in (lambda: engine.forward(input_ids=ids), lambda: engine.generate(input_ids=ids, max_new_tokens=2)):
        with pytest.raises(NonFiniteError, match=r"come first from model\.layers\.1: .* torch\.float32 too narrow"):
            call()
    engine.destroy()
    whole = init_inference(folder, device="cpu", check_finite=True)
    hooks = num_hooks(whole)
    assert whole.generate(input_ids=ids, max_new_tokens=2).shape == (1, 5)
    assert num_hooks(whole) == hooks
    whole.destroy()


def refused(model: nn.Module, *args: Any, **kwargs: Any) -> str:
    """What a forward that is looked at says of it."""
    policy = {} if hasattr(model, "config") else {"injection_policy": {Block: ()}}
    engine = init_inference(model, device="cpu", check_finite=True, **policy)
    try:
        with pytest.raises(NonFiniteError) as caught:
            engine(*args, **kwargs)
    finally:
        engine.destroy()
    assert not model._forward_hooks
    return str(caught.value)


@pytest.mark.parametrize("names", [True, False])
@pytest.mark.parametrize("weight", ["model.norm.weight", "lm_head.weight"])
def test_a_forward_is_looked_at_to_its_end(weight: str, names: bool, folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.get_parameter(weight).data[0] = float("nan")
    found = refused(model, input_ids=torch.tensor([[3, 4, 5]]), return_dict=names)
    assert found.startswith(f"infinities or NaN come first from {AFTER}: its weights may be damaged")
    assert "all layers gave finite numbers" in found


def test_a_loss_of_labels_that_are_all_ignored_is_no_damage(folder: Path) -> None:
    ids = torch.tensor([[3, 4, 5]])
    engine = init_inference(folder, device="cpu", check_finite=True)
    found = engine(input_ids=ids, labels=torch.full_like(ids, -100))
    assert found.loss.isnan()
    assert found.logits.isfinite().all()
    engine.destroy()


def test_a_pooler_is_looked_at() -> None:
    model = family_model("bert", "BertModel")
    model.pooler.dense.weight.data[0, 0] = float("nan")
    assert AFTER in refused(model, **family_inputs(model))


class Told(nn.Module):
    """Gives a mask of infinities beside its logits, to which ``value`` is added."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.decoder = tiny_decoder()
        self.value = value

    def forward(self, ids: torch.Tensor) -> dict[str, Any]:
        return {"parts": [self.decoder(ids) + self.value], "causal_mask": torch.full((3, 3), -torch.inf), "ids": ids}


def test_masks_may_hold_infinities_and_what_lies_beside_them_may_not() -> None:
    ids = torch.tensor([[3, 4, 5]])
    engine = init_inference(Told(1.0), device="cpu", check_finite=True, injection_policy={Block: ()})
    assert engine(ids)["causal_mask"].isinf().all()
    engine.destroy()
    for value in (float("nan"), float("inf"), -float("inf")):
        assert AFTER in refused(Told(value), ids)


PAIRS = {"bart": "BartForConditionalGeneration", "t5": "T5ForConditionalGeneration"}


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("family", "weight", "named"),
    [
        ("bart", "model.encoder.layernorm_embedding.weight", "what comes before model.encoder.layers.0"),
        ("bart", "model.encoder.layers.1.fc1.weight", "model.encoder.layers.1"),
        ("bart", "model.decoder.layernorm_embedding.weight", "what comes before model.decoder.layers.0"),
        ("bart", "model.decoder.layers.0.fc1.weight", "model.decoder.layers.0"),
        ("bart", "model.decoder.layers.2.fc2.weight", "model.decoder.layers.2"),
        ("t5", "encoder.final_layer_norm.weight", "what comes before decoder.block.0"),
        ("t5", "decoder.block.0.layer.1.EncDecAttention.v.weight", "decoder.block.0"),
        ("t5", "decoder.final_layer_norm.weight", AFTER),
    ],
)
def test_what_comes_before_a_stack_is_told_from_its_first_layer(family: str, weight: str, named: str) -> None:
    def damaged() -> PreTrainedModel:
        model = family_model(family, PAIRS[family])
        model.get_parameter(weight).data[0] = float("nan")
        return model

    inputs = family_inputs(damaged())
    assert f"come first from {named}:" in refused(damaged(), **forward_inputs(damaged(), inputs))
    engine = init_inference(damaged(), device="cpu")
    with pytest.raises(NonFiniteError, match=f"come first from {re.escape(named)}:"):
        engine.generate(**inputs, max_new_tokens=3)
    engine.destroy()


def test_a_layer_that_is_called_again_is_not_what_came_before_it() -> None:
    model = family_model("albert", "AlbertModel")
    layers = model.encoder.albert_layer_groups
    layers[0].albert_layers[0].ffn.weight.data[0, 0] = float("nan")
    found = refused(model, **family_inputs(model))
    assert "come first from encoder.albert_layer_groups.0" in found


CHOICES: list[dict[str, Any]] = [
    {"do_sample": False},
    {"do_sample": True, "temperature": 0.9, "top_k": 20},
    {"do_sample": True, "num_beams": 2},
    {"num_beams": 2, "do_sample": False},
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("checks", [False, True], ids=["unasked", "asked"])
@pytest.mark.parametrize("options", CHOICES, ids=lambda options: " ".join(options))
def test_generate_names_the_layer_unasked(options: dict[str, Any], checks: bool, folder: Path) -> None:
    """torch would say that probabilities are NaN where a token is drawn, and nothing at all where the greatest wins."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.model.layers[1].mlp.down_proj.weight.data[5, 5] = float("inf")
    engine = init_inference(model, device="cpu", check_finite=checks)
    with pytest.raises(NonFiniteError, match=r"come first from model\.layers\.1: "):
        engine.generate(input_ids=torch.tensor([[3, 4, 5]]), max_new_tokens=3, **options)
    assert not model._forward_hooks
    engine.destroy()


def test_a_token_drawn_late_breaks_the_text_the_second_time_too(folder: Path) -> None:
    """The input is whole; of the tokens that are drawn one has an embedding of NaN."""
    ids, options = torch.tensor([[3, 4, 5]]), {"max_new_tokens": 12, "do_sample": True}
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(7)
    drawn = model.generate(input_ids=ids, **options)[0, 3:].tolist()
    model.model.embed_tokens.weight.data[drawn[8]] = float("nan")
    engine = init_inference(model, device="cpu")
    torch.manual_seed(7)
    passes = engine.stats().passes
    with pytest.raises(NonFiniteError, match="come first from what comes before the first layer"):
        engine.generate(input_ids=ids, **options)
    assert (engine.stats().passes - passes) % 2 == 0, "as many passes the second time"
    engine.destroy()


def test_what_comes_after_the_layers_and_what_cannot_be_repeated(folder: Path) -> None:
    ids = torch.tensor([[3, 4, 5]])
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.model.norm.weight.data[0] = float("nan")
    engine = init_inference(model, device="cpu")
    with pytest.raises(NonFiniteError, match="come first from what comes after the last layer"):
        engine.generate(input_ids=ids, max_new_tokens=2)
    cache = DynamicCache(config=model.config)
    with pytest.raises(NonFiniteError, match=r"set zinfer\.check_finite to true"):
        engine.generate(input_ids=ids, max_new_tokens=2, past_key_values=cache)
    assert engine.generate(input_ids=ids, max_new_tokens=2, remove_invalid_values=True).shape == (1, 5)
    seen = []
    processors = LogitsProcessorList([lambda ids, scores: seen.append(scores) or scores.nan_to_num()])
    engine.generate(input_ids=ids, max_new_tokens=2, logits_processor=processors)
    assert len(seen) == 2, "whoever chooses by himself sees to it"
    engine.destroy()


@pytest.mark.parametrize(("dtype", "warned"), [("fp16", True), ("bf16", False), (None, False)])
def test_a_family_that_overflows_in_fp16_is_warned_of(
    dtype: str | None, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = ragged_models.tiny_model("gemma2", num_layers=2)
    init_inference(model, device="cpu", dtype=dtype).destroy()
    assert [("gemma2 models were trained in bfloat16" in record.getMessage()) for record in caplog.records] == (
        [True] if warned else []
    )


def test_what_transformers_keeps_in_float32_stays_there(tmp_path: Path) -> None:
    """T5's last projection of each layer: in float16 it overflows."""
    torch.manual_seed(0)
    shape = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 61}
    model = T5ForConditionalGeneration(T5Config(**shape, initializer_factor=1.0)).eval()
    model.save_pretrained(tmp_path)
    ids = torch.tensor([[5, 6, 7, 1]])
    eager = T5ForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float16)
    with torch.no_grad():
        expected = eager(input_ids=ids, decoder_input_ids=ids).logits
    engine = init_inference(model, device="cpu", dtype="fp16")
    kinds = {name.split(".")[-2] for name, weight in model.named_parameters() if weight.dtype is torch.float32}
    assert kinds == {"wo"}
    assert torch.equal(engine(input_ids=ids, decoder_input_ids=ids).logits, expected)
    engine.destroy()
