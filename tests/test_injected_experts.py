"""Mixtures of experts: torch's grouped product as transformers calls it, streamed, with the gate by a kernel."""

import copy
import pickle
from pathlib import Path

import pytest
import torch
from checkpoints import VOCAB_SIZE
from engines import distinct_tokens, engine_for
from ragged_models import tiny_model
from torch import nn
from transformers import PreTrainedModel

import zinfer
from zinfer.inject.experts import overlay_experts
from zinfer.inject.injection import Injection

IDS = torch.randint(2, VOCAB_SIZE, (2, 9), generator=torch.Generator().manual_seed(1))
FAMILIES = ("mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss")
GATED = "gated experts, silu"
GROUPED = "grouped experts"


def experts_of(model: PreTrainedModel) -> nn.Module:
    return next(module for name, module in model.named_modules() if name.endswith("mlp.experts"))


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


@pytest.mark.parametrize("bits", [8, 4])
def test_quantized_experts_are_those_of_each_alone(bits: int, tmp_path: Path) -> None:
    tiny_model("mixtral").save_pretrained(tmp_path)
    found = []
    for implementation in ("eager", "grouped_mm"):
        rules = {"bits": bits, "group_size": 32, "include": ["experts"]}
        config = {"zero_optimization": {"offload_param": {"device": "cpu"}}, "zinfer": {"quantization": rules}}
        engine = zinfer.init_inference(tmp_path, config, device="cpu", replace_with_kernel_inject=True)
        engine.module.set_experts_implementation(implementation)
        found.append(engine(input_ids=IDS).logits)
        engine.destroy()
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)


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


def test_experts_are_the_callers_again() -> None:
    model = tiny_model("mixtral")
    experts, x = experts_of(model), torch.randn(3, 16)
    wanted = experts._apply_gate(x)
    injection = Injection(model)
    assert "_apply_gate" in experts.__dict__
    for other in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(experts_of(other)._apply_gate(x), wanted)
    injection.remove()
    assert "_apply_gate" not in experts.__dict__
