"""Fused kernels in the place of what modules write out: every family computes as before, and what is put in is said."""

import copy
import gc
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import VOCAB_SIZE, tiny_checkpoint
from engines import loaded
from ragged_models import FAMILIES, Reference, tiny_model
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.models.llama import modeling_llama

import zinfer
from zinfer import LLM, SamplingParams
from zinfer.inject.gates import overlay_gate
from zinfer.inject.injection import Injection
from zinfer.inject.norms import overlay_norm
from zinfer.inject.rotations import overlay_rotation
from zinfer.model import families

HALVES = "rotation by halves"
SILU, RMS = "gated MLP, silu", "RMS norm"
EXPECTED = {family.model_type: set(family.fused) for family in families.FAMILIES}


def logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids).logits


@pytest.mark.sampled(4)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_computes_as_before(family: str, device: str) -> None:
    model = tiny_model(family).to(device)
    ids = torch.randint(2, VOCAB_SIZE, (2, 33), generator=torch.Generator().manual_seed(4)).to(device)
    wanted = logits(model, ids)
    injection = Injection(model)
    kinds = {kind for kinds in injection.injected.values() for kind in kinds.split("; ")}
    assert kinds == EXPECTED[family.split("-")[0]]
    assert all(name in dict(model.named_modules()) for name in injection.injected)
    torch.testing.assert_close(logits(model, ids), wanted, rtol=1e-4, atol=1e-4)
    injection.remove()
    assert not any({"forward", "_apply_gate"} & set(module.__dict__) for module in model.modules())
    assert torch.equal(logits(model, ids), wanted)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere", "qwen3", "deepseek_v3"])
def test_ragged_tokens_are_those_of_each_prompt_alone(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(2, VOCAB_SIZE, (length,), generator=generator).tolist() for length in (1, 9, 40)]
    reference = Reference(model, prompts, num_new=8)
    model.save_pretrained(tmp_path)
    config = {"zero_optimization": {"offload_param": {"device": "nvme"}}}
    engine = zinfer.init_inference(tmp_path, config, device="cpu", replace_with_kernel_inject=True)
    assert engine.injected
    reference.check(engine, chunk=7, page_size=16, most_part_tokens=5)
    engine.destroy()


def test_an_engine_says_what_it_computes_by_kernels(device: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama", tmp_path)
    ids = torch.randint(2, VOCAB_SIZE, (2, 9), generator=torch.Generator().manual_seed(1))
    found = {}
    for injects in (None, False, True):
        engine = zinfer.init_inference(folder, device=device, replace_with_kernel_inject=injects)
        found[injects] = engine.generate(input_ids=ids, max_new_tokens=12, do_sample=False).tolist()
        assert bool(engine.injected) == bool(injects), "off where it is not asked for"
        if injects:
            assert engine.injected["model.layers.0.mlp"] == f"{SILU}; gate_proj and up_proj in one product"
            assert engine.injected["model.norm"] == RMS
            assert engine.injected["model.layers.1.self_attn"] == f"{HALVES}; q_proj, k_proj and v_proj in one product"
        engine.destroy()
    assert found[None] == found[False] == found[True]
    with LLM(folder, device=device) as llm:
        assert bool(llm.injected) == (device == "cuda"), "where nothing is said of them"
    both = (LLM(folder, device=device, kernel_inject=injects) for injects in (False, True))
    with next(both) as plain, next(both) as llm:
        assert not plain.injected
        replayed = {"product of few tokens"} if device == "cuda" else set()
        assert {kind.split("; ")[0] for kind in llm.injected.values()} == {RMS, HALVES, SILU} | replayed
        prompts, params = [{"prompt_token_ids": ids[0].tolist()}], SamplingParams(max_new_tokens=12)
        assert llm.generate(prompts, params)[0].token_ids == plain.generate(prompts, params)[0].token_ids


def test_a_model_without_anything_to_fuse_is_said_to_run_as_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for family, said in (("mpt", True), ("llama", False)):
        tiny_model(family).save_pretrained(tmp_path / family)
        caplog.clear()
        with loaded(tmp_path / family, {"zinfer": {"device": "cpu"}}, replace_with_kernel_inject=True) as engine:
            assert bool(engine.injected) is not said
        assert ("nothing in a MptForCausalLM has a fused kernel; it runs as it is" in caplog.text) is said


def test_a_model_of_the_callers_is_his_again(tmp_path: Path) -> None:
    model = tiny_model("llama")
    engine = zinfer.init_inference(model, device="cpu", replace_with_kernel_inject=True)
    assert "forward" in model.model.norm.__dict__
    engine.destroy()
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_model_is_the_callers_again_where_an_engine_is_not_made_or_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr("zinfer.engine.streamed_model.Runtime", fail)
        with pytest.raises(OSError, match="no memory"):
            zinfer.init_inference(model, device="cpu", replace_with_kernel_inject=True)
    assert not any("forward" in module.__dict__ for module in model.modules())
    engine = zinfer.init_inference(model, device="cpu", replace_with_kernel_inject=True)
    assert engine.injected
    del engine
    gc.collect()
    assert not any("forward" in module.__dict__ for module in model.modules())


class Scaled(modeling_llama.LlamaRMSNorm):
    """Differs in a detail."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 1.01 * super().forward(x)


class Clamped(modeling_llama.LlamaMLP):
    def forward(self, x: torch.Tensor) -> Any:
        return self.down_proj(self.act_fn(self.gate_proj(x)).clamp(max=2.0) * self.up_proj(x))


class WithGate(modeling_llama.LlamaRMSNorm):
    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x if gate is None else x * functional.silu(gate))


class ClampedFarOut(modeling_llama.LlamaMLP):
    def forward(self, x: torch.Tensor) -> Any:
        return self.down_proj(self.act_fn(self.gate_proj(x).clamp(max=7.0)) * self.up_proj(x).clamp(-7.0, 7.0))


class EpsOutside(modeling_llama.LlamaRMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x / (x.square().mean(-1, keepdim=True).sqrt() + self.variance_epsilon)


class OverSecond(modeling_llama.LlamaRMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(1, keepdim=True) + self.variance_epsilon)


class Refusing(modeling_llama.LlamaMLP):
    def forward(self, x: torch.Tensor, layer: int | None = None) -> Any:
        return {3: super().forward(x)}[layer]  # type: ignore[index]


class WithResidual(modeling_llama.LlamaMLP):
    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        return super().forward(x) if residual is None else super().forward(x) + residual


def test_what_differs_in_a_detail_is_left_alone() -> None:
    config = tiny_model("llama").config
    assert overlay_norm(modeling_llama.LlamaRMSNorm(8)) is not None
    assert overlay_norm(Scaled(8)) is None
    assert overlay_norm(WithGate(8)) is None
    assert overlay_norm(nn.LayerNorm(8)) is None
    assert overlay_gate(modeling_llama.LlamaMLP(config)) is not None
    assert overlay_gate(Clamped(config)) is None
    assert overlay_gate(ClampedFarOut(config)) is None
    assert overlay_gate(Refusing(config)) is None
    assert overlay_norm(EpsOutside(8, 1e-5)) is None
    assert overlay_norm(OverSecond(8)) is None
    assert overlay_rotation(nn.Linear(2, 2)) is None


@pytest.mark.parametrize("name", ["relu6", "gelu_10"])
def test_activations_that_are_clamped_far_out_are_left_alone(name: str) -> None:
    config = copy.deepcopy(tiny_model("llama").config)
    config.hidden_act = name
    assert overlay_gate(modeling_llama.LlamaMLP(config)) is None


def test_modules_take_what_they_took() -> None:
    config = tiny_model("llama").config
    parts = nn.ModuleList([modeling_llama.LlamaRMSNorm(config.hidden_size), WithResidual(config)])
    x = torch.randn(2, 3, config.hidden_size)
    norm, mlp = parts
    wanted = norm(x), mlp(x, residual=x), mlp(x, x), mlp(x=x)
    assert len(Injection(parts).injected) == 2
    torch.testing.assert_close((norm(hidden_states=x), mlp(x, residual=x), mlp(x, x), mlp(x=x)), wanted)


def test_a_copy_computes_with_its_own_weights() -> None:
    config = tiny_model("llama").config
    parts = nn.ModuleList([modeling_llama.LlamaRMSNorm(config.hidden_size), modeling_llama.LlamaMLP(config)])
    assert len(Injection(parts).injected) == 2
    x = torch.randn(3, config.hidden_size)
    for other in (copy.deepcopy(parts), pickle.loads(pickle.dumps(parts))):
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(3)
        for module in other:
            torch.testing.assert_close(module(x), type(module).forward(module, x))


@pytest.mark.parametrize("family", ["llama", "cohere", "olmo2"])
def test_keys_have_the_dtype_that_they_had_beside_cosines_of_another(family: str) -> None:
    model, ids = tiny_model(family), torch.tensor([[2, 3, 4]])

    def dtypes() -> set[torch.dtype]:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            return {layer.keys.dtype for layer in model(input_ids=ids, use_cache=True).past_key_values.layers}

    wanted = dtypes()
    assert Injection(model).injected
    assert dtypes() == wanted


def test_a_forward_sees_what_its_file_had_when_it_was_overlaid(monkeypatch: pytest.MonkeyPatch) -> None:
    model, num_calls = tiny_model("llama"), 0
    model.config._attn_implementation = "eager"
    Injection(model).remove()
    attend = modeling_llama.eager_attention_forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        return attend(*args, **kwargs)

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", counted)
    Injection(model)
    logits(model, torch.tensor([[2, 3]]))
    assert num_calls == model.config.num_hidden_layers


def test_what_is_default_in_torch_does_not_matter() -> None:
    config = tiny_model("llama").config
    parts = nn.ModuleList([modeling_llama.LlamaRMSNorm(config.hidden_size), modeling_llama.LlamaMLP(config)])
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            assert len(Injection(parts).injected) == 2
    finally:
        torch.set_default_dtype(torch.float32)


def test_hooks_on_an_activation_are_called_as_before() -> None:
    module, calls = modeling_llama.LlamaMLP(tiny_model("llama").config), []
    module.act_fn.register_forward_hook(lambda *args: calls.append(args))
    Injection(module)
    assert not calls, "nor are they called for a probe"
    module(torch.randn(3, module.hidden_size))
    assert len(calls) == 1


def test_weights_of_another_dtype_are_left_to_the_module() -> None:
    module = modeling_llama.LlamaRMSNorm(8)
    overlay = overlay_norm(module)
    assert overlay is not None
    x = torch.randn(3, 8).half()
    assert overlay.forward(x).dtype == module(x).dtype == torch.float32


def test_somebody_elses_overlay_stays() -> None:
    model = tiny_model("llama")
    own = model.model.norm.forward
    model.model.norm.forward = own
    injection = Injection(model)
    assert "model.norm" not in injection.injected
    injection.remove()
    assert model.model.norm.__dict__["forward"] is own


def test_what_somebody_overlays_later_is_not_claimed() -> None:
    model = tiny_model("llama")
    injection = Injection(model)
    assert "model.norm" in injection.injected
    model.model.norm.forward = own = lambda x: x
    assert "model.norm" not in injection.injected
    injection.remove()
    assert model.model.norm.__dict__["forward"] is own
