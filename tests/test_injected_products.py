"""What is put over a model whose forwards are replayed as graphs: products of few tokens, torch's layer norms."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from checkpoints import VOCAB_SIZE
from ragged_models import tiny_model
from torch import nn
from transformers.pytorch_utils import Conv1D

from zinfer.inject import products
from zinfer.inject.fusion_groups import find_packs
from zinfer.inject.injection import Injection
from zinfer.inject.norms import overlay_layer_norm
from zinfer.inject.products import make_rows_contiguous, overlay_product
from zinfer.kernels.gemv import gemv
from zinfer.kernels.quantize import quantize
from zinfer.kernels.quantized import QuantFormat
from zinfer.weights.parameter import QuantizedParameter


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Rows of the matrices that the kernel multiplied with."""
    rows: list[int] = []

    def counting(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        rows.append(weight.shape[0])
        return gemv(x, weight, bias)

    with monkeypatch.context() as patches:
        patches.setattr(products, "gemv", counting)
        yield rows


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("family", "num_packs"), [("gpt2", 0), ("llama", 4), ("opt", 2)])
def test_a_model_computes_as_before(
    family: str, num_packs: int, kernel_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One token by the kernel, several as before; weights that are packed by one product."""
    model = tiny_model(family).half().to(kernel_device)
    ids = torch.randint(2, VOCAB_SIZE, (1, 12), generator=torch.Generator().manual_seed(4)).to(kernel_device)
    with torch.no_grad():
        wanted = [model(input_ids=part).logits.float() for part in (ids[:, :1], ids)]
        values = {name: parameter.clone() for name, parameter in model.named_parameters()}
        places = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
        packs = find_packs(model)
        assert len(packs) == num_packs
        injection = Injection(model, packs, replayed=True)
        for part, logits in zip((ids[:, :1], ids), wanted, strict=True):
            with counted(monkeypatch) as rows:
                found = model(input_ids=part).logits.float()
            assert (found - logits).norm() <= 0.01 * logits.norm()
            assert bool(rows) == (part.shape[1] == 1)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, values[name])
            assert parameter.data_ptr() == places[name]
        injection.remove()
        assert not any("forward" in module.__dict__ for module in model.modules())
        assert (model(input_ids=ids).logits.float() - wanted[1]).norm() <= 0.01 * wanted[1].norm()


def test_the_kernel_takes_all_products_of_a_token(kernel_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("gpt2").half().to(kernel_device)
    Injection(model, replayed=True)
    with torch.no_grad(), counted(monkeypatch) as rows:
        model(input_ids=torch.tensor([[5]], device=kernel_device))
    width = model.config.n_embd
    assert rows == [3 * width, width, 4 * width, width] * model.config.n_layer + [model.config.vocab_size]


def test_only_where_forwards_are_replayed() -> None:
    kinds = set(Injection(tiny_model("opt")).injected.values())
    replayed = Injection(tiny_model("opt"), replayed=True).injected
    assert set(replayed.values()) - kinds == {"layer norm", "product of few tokens"}
    assert replayed["lm_head"] == "product of few tokens"


@pytest.mark.parametrize("is_copied", [False, True])
def test_weights_that_others_copy_keep_their_layout(is_copied: bool) -> None:
    model = tiny_model("gpt2")
    weight = model.transformer.h[0].attn.c_attn.weight
    values = torch.as_strided(weight.detach(), (weight.numel(),), (1,)).clone()
    Injection(model, replayed=True, is_copied=is_copied)
    assert torch.equal(torch.as_strided(weight.detach(), (weight.numel(),), (1,)), values) == is_copied


def test_weights_in_rows_are_seen_as_before() -> None:
    layers = nn.ModuleList([Conv1D(6, 4), Conv1D(6, 4)])
    layers[1].weight = layers[0].weight  # tied: turned once
    values, place = layers[0].weight.detach().clone(), layers[0].weight.data_ptr()
    make_rows_contiguous(layers)
    make_rows_contiguous(layers)
    weight = layers[0].weight
    assert torch.equal(weight, values)
    assert weight.t().is_contiguous()
    assert weight.data_ptr() == place
    x = torch.randn(3, 4)
    torch.testing.assert_close(layers[1](x), torch.addmm(layers[1].bias, x, values))


@pytest.mark.parametrize("layer", [nn.Linear(32, 8), Conv1D(8, 32)])
def test_quantized_weights_keep_their_own_product(layer: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    transposed = isinstance(layer, Conv1D)
    weight = layer.weight.detach().half()
    rows = weight.t().contiguous() if transposed else weight
    matrix = quantize(rows, QuantFormat(8))
    layer.half()
    layer.weight = QuantizedParameter.make(matrix, tuple(weight.shape), transposed=transposed)
    overlay, x = overlay_product(layer), torch.randn(1, 32).half()
    assert overlay is not None
    make_rows_contiguous(nn.ModuleList([layer]))
    with torch.no_grad(), counted(monkeypatch) as counts:
        assert torch.equal(overlay.forward(x), type(layer).forward(layer, x))
    assert not counts


def test_layer_norms_of_torch(kernel_device: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 48, device=kernel_device)
    for norm in (nn.LayerNorm(48, 1e-3), nn.LayerNorm(48, bias=False)):
        norm = norm.to(kernel_device)
        nn.init.normal_(norm.weight)
        overlay = overlay_layer_norm(norm)
        assert overlay is not None
        torch.testing.assert_close(overlay.forward(x), norm(x))
    assert overlay_layer_norm(nn.LayerNorm(48, elementwise_affine=False)) is None
    assert overlay_layer_norm(nn.LayerNorm((3, 48))) is None
