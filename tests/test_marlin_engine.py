"""Models whose matrices lie in the order of fragments: the same bits from every home, and those of rounded weights."""

from pathlib import Path

import pytest
import torch
from checkpoints import FRAGMENT_SHAPE, left_padded, random_prompts
from packed_cache_support import engine_of
from store_support import formats_of, make_store, write_module
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, PreTrainedModel

from zinfer.kernels.dequantize import dequantize_ref
from zinfer.kernels.quantize import quantize
from zinfer.kernels.quantized import QuantFormat
from zinfer.weights.parameter import QuantizedParameter

SECTION: dict[str, object] = {"bits": 4, "group_size": 128}


def random_model(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**FRAGMENT_SHAPE)).to(torch.float16).eval()
    return MixtralForCausalLM(MixtralConfig(**FRAGMENT_SHAPE, num_local_experts=4)).to(torch.float16).eval()


def rounded(model: PreTrainedModel) -> PreTrainedModel:
    """The model with what codes in the order of rows stand for."""
    for name, parameter in model.named_parameters():
        if name.startswith("model.layers.") and parameter.dim() > 1 and ".gate." not in name:
            matrix = quantize(parameter.detach().view(-1, parameter.shape[-1]), QuantFormat(4, 128))
            parameter.data = dequantize_ref(matrix).view(parameter.shape)
    return model


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_every_home_gives_the_same_bits(kind: str, tmp_path: Path, device: str) -> None:
    model = write_module(random_model(kind), tmp_path / "model")
    make_store(model, tmp_path / "store", device, **SECTION)
    assert [format["in_fragments"] for format in formats_of(tmp_path / "store")] == [True]
    input_ids, attention_mask = left_padded(random_prompts(3, seed=4))
    batch = {"input_ids": input_ids, "attention_mask": attention_mask}
    found: list[torch.Tensor] = []
    for folder, section, home, tier in (
        (model, SECTION, "none", "DEVICE"),
        (model, SECTION, "cpu", "HOST"),
        (tmp_path / "store", None, "none", "DEVICE"),
        (tmp_path / "store", None, "nvme", "DISK"),
    ):
        with engine_of(folder, None, section, home=home, device=device) as engine:
            assert engine.stats().blocks_by_home[tier] >= 2
            found.append(engine(**batch).logits.cpu())
    assert all(torch.equal(found[0], other) for other in found)
    with torch.no_grad():
        wanted = rounded(random_model(kind)).to(device)(**{name: value.to(device) for name, value in batch.items()})
    error = (found[0].float() - wanted.logits.cpu().float()).norm() / wanted.logits.cpu().float().norm()
    assert error < 0.05


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_modules_hold_the_rounded_weights(kind: str, tmp_path: Path, device: str) -> None:
    model = write_module(random_model(kind), tmp_path / "model")
    with engine_of(model, None, SECTION, home="none", device=device) as engine:
        held = dict(engine.module.named_parameters())
        num_quantized = 0
        for name, wanted in rounded(random_model(kind)).named_parameters():
            parameter = held[name]
            if isinstance(parameter, QuantizedParameter):
                assert parameter.matrix.format.in_fragments
                assert torch.equal(parameter.dequantized().cpu(), wanted)
                if parameter.dim() == 3:
                    assert torch.equal(parameter[2].dequantized().cpu(), wanted[2])
                num_quantized += 1
        assert num_quantized == {"llama": 2 * 7, "mixtral": 2 * 6}[kind]
