"""What quantizing costs: right answers of the trained demo, and logits of a random model with heavy-tailed weights."""

import json
from pathlib import Path

import pytest
import torch
from checkpoints import left_padded, random_prompts, tiny_model
from transformers import AutoTokenizer

import zinfer
from zinfer.kernels.dequantize import dequantize_ref
from zinfer.kernels.quantize import full_range, least_error_range, quantize
from zinfer.kernels.quantized import QuantFormat

DEMO = Path(__file__).resolve().parent.parent / "examples" / "demo"
NUM_ANSWER_TOKENS = 8


def num_right(section: dict[str, object] | None) -> int:
    """Sums of the demo's prompts that come out right."""
    prompts = [json.loads(line)["prompt"] for line in (DEMO / "prompts.jsonl").read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "model")
    settings = {"device": "cpu"} | ({} if section is None else {"quantization": section})
    offload = {"offload_param": {"device": "cpu"}}
    engine = zinfer.init_inference(DEMO / "model", {"zero_optimization": offload, "zinfer": settings})
    inputs = tokenizer(prompts, padding=True, return_tensors="pt")
    tokens = engine.generate(**inputs, max_new_tokens=NUM_ANSWER_TOKENS, do_sample=False)
    engine.destroy()
    texts = tokenizer.batch_decode(tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    sums = [sum(int(number) for number in prompt.removesuffix("=").split("+")) for prompt in prompts]
    return sum(text == str(right) for text, right in zip(texts, sums, strict=True))


@pytest.fixture(scope="module")
def full_score() -> int:
    score = num_right(None)
    assert score >= 196, "the demo itself has to answer well for a share of it to say anything"
    return score


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("section", "least_share"),
    [
        ({"bits": 8}, 0.99),
        ({"bits": 8, "format": "fp8"}, 0.97),
        ({"bits": 4, "group_size": 64}, 0.97),
        ({"bits": 4, "group_size": 64, "search": "clip"}, 0.97),
        ({"bits": 8, "activations": True}, 0.97),
        ({"bits": 8, "format": "fp8", "activations": True}, 0.95),
    ],
)
def test_the_demo_answers_as_well_as_in_full(full_score: int, section: dict[str, object], least_share: float) -> None:
    assert num_right(section) >= least_share * full_score


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("section", "most_error"),
    [
        ({"bits": 8}, 0.10),
        ({"bits": 8, "group_size": 32}, 0.08),
        ({"bits": 4, "group_size": 32}, 0.80),
        ({"bits": 4, "group_size": 32, "symmetric": False}, 0.70),
    ],
)
def test_logits_of_heavy_tailed_weights_stay_near(section: dict[str, object], most_error: float) -> None:
    """Student's t with three degrees of freedom: outliers of ten standard deviations in every matrix."""
    ids, mask = left_padded(random_prompts(6, seed=1))
    model = tiny_model("llama", num_layers=12)
    generator = torch.Generator().manual_seed(4)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and "layers" in name:
            normal = torch.randn(4, *parameter.shape, generator=generator)
            parameter.data.copy_(0.05 * normal[0] / normal[1:].square().mean(0).sqrt().clamp(min=0.03))
    with torch.no_grad():
        full = model(input_ids=ids, attention_mask=mask).logits
    engine = zinfer.init_inference(model, {"zinfer": {"quantization": section, "device": "cpu"}})
    error = float((engine(input_ids=ids, attention_mask=mask).logits - full).norm() / full.norm())
    engine.destroy()
    print(f"{section}: relative error of the logits {error:.4f}")
    assert 0 < error < most_error


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_searching_for_the_range_never_costs_accuracy(bits: int, symmetric: bool) -> None:
    generator = torch.Generator().manual_seed(bits)
    matrix = torch.randn(64, 512, generator=generator)
    format = QuantFormat(4 if bits == 4 else 8, 128, symmetric)
    errors = {
        bounds: (dequantize_ref(quantize(matrix, format, bounds=bounds)) - matrix).square().view(64, 4, 128).sum(-1)
        for bounds in (least_error_range, full_range)
    }
    assert (errors[least_error_range] <= errors[full_range] * (1 + 1e-6)).all()
    if bits == 4:
        assert errors[least_error_range].sum() < 0.9 * errors[full_range].sum()
