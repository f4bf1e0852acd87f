"""Mixtures of experts: the grouped product in the place of transformers', streamed, with the gate by a kernel."""

import copy
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import FRAGMENT_SHAPE, VOCAB_SIZE
from engines import distinct_tokens, engine_for
from ragged_models import tiny_model
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedModel
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

import zinfer
from zinfer import LLM, SamplingParams
from zinfer.inject import grouped_experts
from zinfer.inject.gates import overlay_experts
from zinfer.inject.grouped_experts import overlay_grouped_experts
from zinfer.inject.injection import Injection
from zinfer.kernels.grouped_linear import grouped_linear_kernel
from zinfer.weights.parameter import QuantizedParameter

IDS = torch.randint(2, VOCAB_SIZE, (2, 9), generator=torch.Generator().manual_seed(1))
FAMILIES = ("mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss")
GATED = "gated experts, silu"
GROUPED = "grouped experts"


def experts_of(model: PreTrainedModel) -> nn.Module:
    return next(module for name, module in model.named_modules() if name.endswith("mlp.experts"))


@contextmanager
def injected(folder: Path, config: dict[str, object], device: str = "cuda", **options: object) -> Iterator[Any]:
    engine = zinfer.init_inference(folder, config, device=device, replace_with_kernel_inject=True, **options)
    try:
        yield engine
    finally:
        engine.destroy()


@pytest.mark.sampled(5)
@pytest.mark.parametrize("family", FAMILIES)
def test_experts_are_multiplied_in_groups_wherever_they_live(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    model.save_pretrained(tmp_path)
    model.set_experts_implementation("eager")
    with torch.no_grad():
        wanted = model(input_ids=IDS).logits
    tokens = model.generate(input_ids=IDS, max_new_tokens=8, do_sample=False)
    assert distinct_tokens(tokens) > 3
    nbytes = {}
    for homes in ("resident", "host", "disk"):
        for injects in (False, True):
            with engine_for(tmp_path, homes, replace_with_kernel_inject=injects) as engine:
                assert engine.module.config._experts_implementation == "grouped_mm"
                kinds = {f"{GATED}; {GROUPED}", GROUPED} & set(engine.injected.values())
                assert kinds == ({GROUPED if family == "gpt_oss" else f"{GATED}; {GROUPED}"} if injects else set())
                torch.testing.assert_close(engine(input_ids=IDS).logits, wanted, rtol=1e-3, atol=1e-3)
                assert torch.equal(engine.generate(input_ids=IDS, max_new_tokens=8, do_sample=False), tokens)
                nbytes[homes, injects] = engine.stats().streamed_bytes_per_pass
        assert nbytes[homes, True] == nbytes[homes, False]
        assert (nbytes[homes, True] > 0) == (homes != "resident")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_experts_by_the_kernel(family: str, kernel_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(family).to(kernel_device)
    model.set_experts_implementation("eager")
    ids = IDS[:1].to(kernel_device)
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
        model.set_experts_implementation("grouped_mm")
        injection = Injection(model)  # what recognises experts computes on a CPU
        monkeypatch.setattr(grouped_experts, "grouped_linear", grouped_linear_kernel)
        assert GROUPED in next(kinds for kinds in injection.injected.values() if "experts" in kinds)
        torch.testing.assert_close(model(input_ids=ids).logits, wanted, rtol=1e-3, atol=1e-3)


def test_experts_of_no_tokens_give_none() -> None:
    experts = experts_of(tiny_model("mixtral"))
    width = experts.down_proj.shape[1]
    found = grouped_experts._computed(experts, torch.zeros(0, width), torch.zeros(0, 2).long(), torch.zeros(0, 2))
    assert found.shape == (0, width)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("rules", [{"bits": 8}, {"bits": 4, "group_size": 32}], ids=str)
def test_quantized_experts_are_those_of_each_alone(
    rules: dict[str, object], tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model("mixtral").save_pretrained(tmp_path)
    found = []
    dequantized = QuantizedParameter.dequantized

    def of_one(self: QuantizedParameter) -> torch.Tensor:
        assert self.dim() == 2, "all experts are dequantized"
        return dequantized(self)

    monkeypatch.setattr(QuantizedParameter, "dequantized", of_one)
    for implementation in ("eager", "grouped_mm"):
        section = {"quantization": {**rules, "include": ["experts"]}}
        config = {"zero_optimization": {"offload_param": {"device": "cpu"}}, "zinfer": section}
        with injected(tmp_path, config, device) as engine:
            engine.module.set_experts_implementation(implementation)
            found.append(engine(input_ids=IDS).logits)
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_texts_of_quantized_experts_in_ragged_passes(family: str, tmp_path: Path, device: str) -> None:
    tiny_model(family).save_pretrained(tmp_path)
    config = {"zinfer": {"quantization": {"bits": 8, "group_size": 16, "include": ["experts"]}}}
    with injected(tmp_path, config, device) as engine:
        wanted = [engine.generate(input_ids=row[None], max_new_tokens=8, do_sample=False) for row in IDS]
        tokens = [each[0, IDS.shape[1] :].tolist() for each in wanted]
    assert min(len(set(each)) for each in tokens) > 2
    for homes in ("none", "cpu"):
        options = {"device": device, "kv_cache_memory": "2MB", "replace_with_kernel_inject": True}
        offload = {"zero_optimization": {"offload_param": {"device": homes}}}
        with LLM(tmp_path, config | offload, **options) as llm:
            assert any(GROUPED in kinds for kinds in llm.injected.values())
            params = SamplingParams(max_new_tokens=8)
            found = llm.generate([{"prompt_token_ids": row.tolist()} for row in IDS], params)
            assert [list(each.token_ids) for each in found] == tokens


def test_quantized_experts_that_lie_transposed_are_dequantized(tmp_path: Path, device: str) -> None:
    """Their groups run along what comes out, not along what is summed."""
    tiny_model("gpt_oss").save_pretrained(tmp_path)
    found = []
    for injects in (False, True):
        config = {"zinfer": {"quantization": {"bits": 8, "include": ["experts"]}}}
        engine = zinfer.init_inference(tmp_path, config, device=device, replace_with_kernel_inject=injects)
        found.append(engine(input_ids=IDS).logits)
        engine.destroy()
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("rules", [None, {"bits": 8}, {"bits": 4, "group_size": 128}], ids=str)
def test_texts_of_a_mixture_in_float16(rules: dict[str, object] | None, tmp_path: Path) -> None:
    """Of graphs, which none of it stops by waiting for the device; each token is the likeliest, but for rounding."""
    torch.manual_seed(0)
    MixtralForCausalLM(MixtralConfig(**FRAGMENT_SHAPE, num_local_experts=4)).half().save_pretrained(tmp_path)
    section = {} if rules is None else {"zinfer": {"quantization": {**rules, "include": ["experts"]}}}
    with injected(tmp_path, section, enable_cuda_graph=True) as engine:
        assert any(GROUPED in kinds for kinds in engine.injected.values())
        found = engine(input_ids=IDS).logits.float().cpu()
        tokens = engine.generate(input_ids=IDS, max_new_tokens=8, do_sample=False).cpu()
        assert engine.graphs.replayed > 0, engine.graphs
    with injected(tmp_path, section) as engine:
        engine.module.set_experts_implementation("eager")
        wanted = engine(input_ids=IDS).logits.float().cpu()
        logits = engine(input_ids=tokens).logits[:, IDS.shape[1] - 1 : -1].float().cpu()
    assert (found - wanted).norm() < 0.02 * wanted.norm()
    chosen = logits.gather(-1, tokens[:, IDS.shape[1] :, None]).squeeze(-1)
    assert distinct_tokens(tokens[:, IDS.shape[1] :]) > 2
    assert bool((logits.amax(-1) - chosen <= 0.05 * logits.std()).all())


def test_many_tokens_in_bfloat16_come_to_what_transformers_makes_of_them(device: str) -> None:
    torch.manual_seed(0)
    model = tiny_model("mixtral").to(device, torch.bfloat16)
    experts = experts_of(model)
    x = torch.randn(300, model.config.hidden_size, dtype=torch.bfloat16, device=device)
    chosen = torch.rand(300, 4, device=device).topk(2).indices
    given = x, chosen, torch.full_like(chosen, 0.5, dtype=torch.bfloat16)
    with torch.no_grad():
        wanted = experts(*given)
        assert any(GROUPED in kinds for kinds in Injection(model).injected.values())
        found = experts(*given)
    torch.testing.assert_close(found, wanted, rtol=0.01, atol=0.01 * wanted.abs().max().item())


def test_what_goes_expert_by_expert_or_gates_otherwise_is_left_alone() -> None:
    model = tiny_model("mixtral")
    experts = experts_of(model)
    assert overlay_experts(experts) is not None
    assert overlay_experts(experts_of(tiny_model("gpt_oss"))) is None
    hook = experts.act_fn.register_forward_hook(lambda *args: None)
    assert overlay_experts(experts) is None
    hook.remove()
    model.set_experts_implementation("eager")
    assert overlay_experts(experts) is None
    assert overlay_grouped_experts(experts) is None


def test_experts_that_compute_otherwise_are_left_alone() -> None:
    class Doubled(MixtralExperts):
        def forward(self, hidden_states: torch.Tensor, *args: torch.Tensor) -> torch.Tensor:
            return super().forward(2 * hidden_states, *args)

    experts = experts_of(tiny_model("mixtral"))
    assert overlay_grouped_experts(experts) is not None
    experts.__class__ = Doubled
    assert overlay_grouped_experts(experts) is None
    assert overlay_grouped_experts(nn.Linear(3, 3)) is None


def test_what_is_set_later_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("mixtral")
    experts = experts_of(model)
    Injection(model)
    x = torch.randn(5, model.config.hidden_size)
    given = x, torch.tensor([[0, 1]] * 5), torch.full((5, 2), 0.5)
    wanted = experts(*given)

    def refused(*args: object) -> torch.Tensor:
        raise AssertionError("it is not to be called")

    monkeypatch.setattr(grouped_experts, "grouped_linear", refused)
    with pytest.raises(AssertionError, match="not to be called"):
        experts(*given)
    with torch.autocast("cpu", torch.bfloat16):
        experts(*given)
    torch.testing.assert_close(experts(x, top_k_index=given[1], top_k_weights=given[2]), wanted)
    model.set_experts_implementation("eager")
    torch.testing.assert_close(experts(*given), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager"])
def test_compiled_parts_go_around_it(backend: str) -> None:
    model = tiny_model("mixtral")
    with torch.no_grad():
        wanted = model(input_ids=IDS).logits
        injection = Injection(model)  # what recognises experts computes on a CPU
        block = model.model.layers[0].mlp
        block.forward = torch.compile(block.forward, backend=backend)
        torch.testing.assert_close(model(input_ids=IDS).logits, wanted, rtol=1e-3, atol=1e-3)
    injection.remove()
    assert "forward" not in experts_of(model).__dict__


def test_experts_are_the_callers_again() -> None:
    model = tiny_model("mixtral")
    experts, x = experts_of(model), torch.randn(3, 16)
    wanted = experts._apply_gate(x)
    injection = Injection(model)
    given = torch.randn(3, model.config.hidden_size), torch.tensor([[0, 1]] * 3), torch.full((3, 2), 0.5)
    assert {"_apply_gate", "forward"} <= experts.__dict__.keys()
    made = experts(*given)
    for other in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(experts_of(other)._apply_gate(x), wanted)
        torch.testing.assert_close(experts_of(other)(*given), made)
    injection.remove()
    assert not {"_apply_gate", "forward"} & experts.__dict__.keys()
