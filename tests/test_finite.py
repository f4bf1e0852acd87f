"""Numbers that are not finite: which layer made them first is said, by `LLM` of itself and by an engine if asked."""

from pathlib import Path

import pytest
import torch
from llm_support import by_ids, folder
from transformers import AutoModelForCausalLM

from zinfer import LLM, InferenceEngine, SamplingParams, init_inference
from zinfer.errors import NonFiniteError

__all__ = ["folder"]  # fixture


def num_hooks(engine: InferenceEngine) -> int:
    return sum(len(layer._forward_hooks) + len(layer._forward_pre_hooks) for layer in engine.layers)


@pytest.mark.parametrize("home", ["none", "nvme"])
@pytest.mark.parametrize("place", [0, 2])
def test_the_layer_that_broke_a_text_is_named(place: int, home: str, folder: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.model.layers[place].mlp.down_proj.weight.data[5, 5] = float("inf")
    model.save_pretrained(tmp_path)
    config = {"zero_optimization": {"offload_param": {"device": home}}}
    with LLM(tmp_path, config, device="cpu", kv_cache_memory="1MB") as llm:
        hooks = num_hooks(llm._engine)
        for _ in range(2):
            found = llm.generate(by_ids([[3, 4, 5], [6, 7]]), SamplingParams(max_new_tokens=2))
            assert [each.finish_reason for each in found] == ["error"] * 2
            for each in found:
                assert str(each.error).endswith(f"the first that are not come from model.layers.{place}")
            assert num_hooks(llm._engine) == hooks, "nobody looks any more"


def test_what_comes_before_the_layers_is_told_apart(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.model.embed_tokens.weight.data[7] = float("nan")
    with LLM(model, device="cpu", kv_cache_memory="1MB") as llm:
        good, bad = llm.generate(by_ids([[3, 4, 5], [6, 7]]), SamplingParams(max_new_tokens=2))
    assert good.error is None
    assert str(bad.error).endswith("come from what comes before the first layer")


def test_an_engine_names_the_layer_where_it_is_asked_to_look(folder: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.model.layers[1].input_layernorm.weight.data[3] = float("nan")
    model.save_pretrained(tmp_path)
    ids = torch.tensor([[3, 4, 5]])
    quiet = init_inference(tmp_path, device="cpu")
    quiet.generate(input_ids=ids, max_new_tokens=2)
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
