"""In 16 bits fused kernels are about as near to float64 as transformers' own code is."""

from pathlib import Path

import pytest
import torch
from checkpoints import VOCAB_SIZE
from family_models import CASES, Tensors, family_inputs, family_model, outputs_of
from transformers import PreTrainedModel

import zinfer

MOST_OVER_OWN = 1.2
MODELS = [(family.model_type, family.classes[0]) for family in dict(CASES)]
ROWS, TOKENS = 16, 24


def many_inputs(model: PreTrainedModel) -> Tensors:
    """Rows without padding: what is hidden may be anything."""
    generator = torch.Generator().manual_seed(5)
    inputs = family_inputs(model, ROWS)
    inputs.pop("attention_mask", None)
    if "input_ids" in inputs:
        inputs["input_ids"] = torch.randint(2, VOCAB_SIZE, (ROWS, TOKENS), generator=generator)
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.randint(2, VOCAB_SIZE, (ROWS, TOKENS), generator=generator)
    return inputs


def cast(inputs: Tensors, dtype: torch.dtype, device: str) -> Tensors:
    return {name: (x.to(dtype) if x.is_floating_point() else x).to(device) for name, x in inputs.items()}


def error(difference: torch.Tensor, is_mixture: bool) -> float:
    """Of all tokens; of the one in the middle where rounding may send a token to another expert, whoever rounds."""
    of_tokens = difference.flatten(0, -2).norm(dim=-1)
    return float(of_tokens.median() if is_mixture else of_tokens.norm())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(("family", "class_name"), MODELS, ids=[family for family, _ in MODELS])
def test_errors_are_those_of_transformers(
    family: str, class_name: str, dtype: torch.dtype, device: str, tmp_path: Path
) -> None:
    random = family_model(family, class_name)
    random.save_pretrained(tmp_path)
    model = type(random).from_pretrained(tmp_path, dtype=dtype).eval()
    inputs = many_inputs(model)
    with torch.no_grad():
        own = outputs_of(model.to(device)(**cast(inputs, dtype, device)))
        engine = zinfer.init_inference(tmp_path, device=device, dtype=dtype, replace_with_kernel_inject=True)
        found = outputs_of(engine(**cast(inputs, dtype, device)))
        engine.destroy()
        is_mixture = model._can_set_experts_implementation()
        if is_mixture:
            model.set_experts_implementation("eager")  # torch's grouped products take no float64
        wanted = outputs_of(model.to("cpu").double()(**cast(inputs, torch.float64, "cpu")))
    for name, exact in wanted.items():
        ours, theirs = (error(each[name].double().cpu() - exact, is_mixture) for each in (found, own))
        assert 0 < theirs < error(exact, is_mixture), "noise, or nothing"
        assert ours <= MOST_OVER_OWN * theirs, (name, ours / theirs)
