"""One product for layers that multiply the same numbers: who shares, where weights lie, and what stays as it was."""

import copy
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import VOCAB_SIZE, tiny_checkpoint
from engine_support import settled
from engines import HOMES, distinct_tokens, engine_for
from product_counting import counted_products
from ragged_models import FAMILIES, tiny_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.models.llama import modeling_llama

import zinfer
from zinfer import LLM, SamplingParams
from zinfer.inject import grouped_experts
from zinfer.inject.fusion_groups import find_packs
from zinfer.inject.injection import Injection

HEADS, GATES = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
LATENT = ("q_a_proj", "kv_a_proj_with_mqa")
EXPECTED: dict[str, set[tuple[str, ...]]] = {
    "bloom": set(),
    "deepseek_v2": {LATENT, GATES},
    "deepseek_v3": {LATENT, GATES},
    "falcon": set(),
    "glm4": {HEADS},
    "gpt2": set(),
    "gpt_neox": set(),
    "gpt_oss": {HEADS},
    "gptj": {HEADS},
    "mixtral": {HEADS},
    "mpt": set(),
    "opt": {HEADS},
    "phi": {HEADS},
    "qwen3_moe": {HEADS},
    "starcoder2": {HEADS},
}
"""Families whose checkpoints hold no separate matrices share nothing; those that are not named share both."""
IDS = torch.randint(2, VOCAB_SIZE, (2, 9), generator=torch.Generator().manual_seed(1))


def run(model: Any) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Logits, greedy tokens, and the products of one pass."""
    ids = IDS.to(model.device)
    with torch.no_grad(), counted_products() as rows:
        logits = model(input_ids=ids).logits
    return logits, model.generate(input_ids=ids, max_new_tokens=8, do_sample=False, pad_token_id=1), len(rows)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_computes_as_before_in_fewer_products(
    family: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Biases of two heads take 128 bytes, and would not lie side by side.
    if "num_key_value_heads" not in FAMILIES[family]:
        monkeypatch.setitem(FAMILIES, family, FAMILIES[family] | {"num_key_value_heads": 4})
    # On a CPU experts are multiplied one by one where kernels are injected: those are not what is counted here.
    monkeypatch.setattr(grouped_experts, "_is_ours", lambda *given: False)
    model = tiny_model(family).to(device)
    wanted, tokens, num_products = run(model)
    assert distinct_tokens(tokens) > 3
    packs = find_packs(model)
    assert {pack.layers for pack in packs} == EXPECTED.get(family.split("-")[0], {HEADS, GATES})
    engine = zinfer.init_inference(model, device=device, replace_with_kernel_inject=True)
    found, found_tokens, num_now = run(engine)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert torch.equal(found_tokens, tokens)
    assert num_now == num_products - sum(len(pack.layers) - 1 for pack in packs)
    assert sum("in one product" in kind for kind in engine.injected.values()) == len(packs)
    products = [weakref.ref(model.get_submodule(pack.module).forward.__self__) for pack in packs]
    engine.destroy()
    assert not any(product() for product in products), "nor is a view left of the memory that is given back"
    assert not any("forward" in module.__dict__ for module in model.modules())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("homes", HOMES)
def test_weights_move_as_many_bytes_as_apart(folder: Path, homes: str) -> None:
    found = {}
    for injects in (False, True):
        with engine_for(folder, homes, 3, replace_with_kernel_inject=injects) as engine:
            logits, tokens, num_products = run(engine)
            stats = settled(engine)
            nbytes = stats.streamed_bytes_per_pass, stats.disk_bytes_per_pass, stats.device_bytes, stats.host_bytes
            found[injects] = logits, tokens, num_products, nbytes, stats.loaded_bytes
    torch.testing.assert_close(found[True][0], found[False][0], rtol=1e-4, atol=1e-4)
    assert torch.equal(found[True][1], found[False][1])
    assert found[True][2] == found[False][2] - 5 * (2 + 1), (
        "five layers; two products spared beside heads, one by gates"
    )
    assert found[True][3:] == found[False][3:]
    assert (found[True][3][0] > 0) == (homes != "resident")


def test_texts_in_one_batch_share_products_too(folder: Path) -> None:
    prompts, params = [{"prompt_token_ids": row.tolist()} for row in IDS], SamplingParams(max_new_tokens=12)
    found, kinds = [], set[str]()
    for injects in (False, True):
        with LLM(folder, device="cpu", kernel_inject=injects) as llm:
            found.append([completion.token_ids for completion in llm.generate(prompts, params)])
            kinds |= set(llm.injected.values())
    assert found[0] == found[1]
    assert "rotation by halves; q_proj, k_proj and v_proj in one product" in kinds


QUANTIZED: dict[str, dict[str, object]] = {
    "int8": {"bits": 8},
    "int8 asymmetric": {"bits": 8, "symmetric": False, "group_size": 32},
    "int4": {"bits": 4, "group_size": 32},
    "fragments": {"bits": 4, "group_size": 64},
    "fp8": {"bits": 8, "format": "fp8"},
    "w8a8": {"bits": 8, "activations": True},
    "fp8-products": {"bits": 8, "format": "fp8", "activations": True},
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("homes", ["none", "cpu", "nvme"])
@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_weights_are_one_matrix_too(
    name: str, homes: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_cuda = device == "cuda"
    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCAB_SIZE, initializer_range=0.1, head_dim=64,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.float16 if on_cuda else torch.float32).save_pretrained(tmp_path / "model")
    offload = {"device": homes} | ({"nvme_path": str(tmp_path)} if homes == "nvme" else {})
    rules = {"zero_optimization": {"offload_param": offload}, "zinfer": {"quantization": QUANTIZED[name]}}
    found = []
    for injects in (False, True):
        if injects and not on_cuda:  # where all matrices are dequantized
            monkeypatch.setattr("zinfer.weights.parameter.is_fused", lambda matrix, tokens: True)
        engine = zinfer.init_inference(tmp_path / "model", rules, device=device, replace_with_kernel_inject=injects)
        with counted_products() as rows:
            logits = engine(input_ids=IDS).logits
        attention = engine.module.model.layers[0].self_attn
        assert any("in one product" in kind for kind in engine.injected.values()) == injects
        found.append((logits, len(rows), settled(engine).streamed_bytes_per_pass, type(attention.q_proj.weight)))
        engine.destroy()
    if on_cuda and name == "fp8-products":  # a product's last bit decides how an activation rounds to three bits
        assert (found[1][0] - found[0][0]).norm() <= 0.15 * found[0][0].norm()
    else:
        allowed = (5e-2 if on_cuda else 1e-4) * found[0][0].abs().max().item()
        torch.testing.assert_close(found[1][0], found[0][0], rtol=0, atol=allowed)
    assert found[1][1] == found[0][1] - 2 * (2 + 1)
    assert found[1][2:] == found[0][2:]
    assert (found[1][2] > 0) == (homes != "none")


def test_matrices_that_would_be_dequantized_are_multiplied_apart(folder: Path) -> None:
    found = []
    for injects in (False, True):
        config = {"zinfer": {"quantization": {"bits": 8}}}
        engine = zinfer.init_inference(folder, config, device="cpu", replace_with_kernel_inject=injects)
        found.append(run(engine)[1:])
        engine.destroy()
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1], "the memory of the largest one is all that is planned for"


def test_matrices_of_two_kinds_are_multiplied_apart(folder: Path) -> None:
    config = {"zinfer": {"quantization": {"bits": 8, "activations": True, "exclude": ["gate_proj", "v_proj"]}}}
    engine = zinfer.init_inference(folder, config, device="cpu", replace_with_kernel_inject=True)
    assert not any("in one product" in kind for kind in engine.injected.values())
    engine.destroy()


def test_biases_that_lie_apart_leave_the_layers_apart() -> None:
    model = tiny_model("phi")  # two heads of keys: 128 bytes of bias
    wanted = run(model)
    assert find_packs(model)
    engine = zinfer.init_inference(model, device="cpu", replace_with_kernel_inject=True)
    found = run(engine)
    assert not any("in one product" in kind for kind in engine.injected.values())
    assert found[2] == wanted[2]
    assert torch.equal(found[1], wanted[1])
    engine.destroy()


class Adapted(nn.Linear):
    """As an adapter wraps a layer."""


class Apart(modeling_llama.LlamaAttention):
    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.q_proj(hidden_states), self.k_proj(hidden_states * 2), self.v_proj(hidden_states)


def test_who_is_given_the_same_is_seen_and_not_guessed() -> None:
    model: PreTrainedModel = tiny_model("llama", num_layers=1)
    attention = model.model.layers[0].self_attn
    attention.__class__ = Apart
    assert [pack.layers for pack in find_packs(model)] == [("q_proj", "v_proj"), GATES]
    attention.v_proj.__class__ = Adapted
    assert [pack.layers for pack in find_packs(model)] == [GATES]
    model.model.layers[0].mlp.forward = model.model.layers[0].mlp.forward
    assert not find_packs(model)


class Clamped(modeling_llama.LlamaMLP):
    def forward(self, x: torch.Tensor) -> Any:
        return self.down_proj(self.act_fn(self.gate_proj(x)).clamp(max=2.0) * self.up_proj(x))


@pytest.mark.parametrize("intermediate_size", [96, 160])
def test_gates_that_no_kernel_takes_share_only_narrow_products(intermediate_size: int) -> None:
    config = LlamaConfig(hidden_size=64, intermediate_size=intermediate_size)
    parts = nn.ModuleDict({"mlp": Clamped(config)})
    injection = Injection(parts, find_packs(parts))
    is_narrow = 2 * intermediate_size <= 4 * 64
    assert injection.injected == ({"mlp": "gate_proj and up_proj in one product"} if is_narrow else {})


def test_hooks_of_a_layer_see_what_they_saw() -> None:
    model, seen = tiny_model("llama", num_layers=1), []
    layer = model.model.layers[0].self_attn.k_proj
    layer.register_forward_hook(lambda module, args, output: seen.append(output.clone()))
    engine = zinfer.init_inference(copy.deepcopy(model), device="cpu", replace_with_kernel_inject=True)
    assert not seen, "nor are they called for a probe"
    run(model)
    num_calls = len(seen)
    engine.module.model.layers[0].self_attn.k_proj.register_forward_hook(lambda *args: seen.append(args[2].clone()))
    run(engine)
    engine.destroy()
    assert len(seen) == 3 * num_calls, "the copy has the first hook too"
    torch.testing.assert_close(seen[num_calls], seen[0], rtol=1e-4, atol=1e-4)
