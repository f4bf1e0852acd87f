"""Measures what products lose where their inputs are rounded to 8 bits (`zinfer.quantization.activations`)."""

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers.pytorch_utils import Conv1D

from zinfer.config.quantization_rules import Quantization
from zinfer.kernels.dequantize import dequantize_ref
from zinfer.kernels.quantized import QuantizedMatrix
from zinfer.weights.parameter import QuantizedParameter

_MOST_TOKENS: Final = 64
_SLICE_ELEMENTS: Final = 4 << 20  # of a matrix in float32 at a time: 16 MB of what a plan reserves for CUDA
_MOST_SLICES: Final = 4


class InputErrors:
    """Relative errors of linear layers that round their inputs, each measured once, in its first forward.

    The error of a layer is ||rounded - exact|| / ||exact|| (Frobenius norms) over at most 64 of its tokens, padding
    included, and 16 million elements of its matrix, both evenly spread. ``rounded`` is what the layer gave, without its
    bias; ``exact`` is the product of the same inputs, not rounded, and the same quantized weights, in float32. So it is
    the error of single products on real inputs, without that of the weights. It says nothing of errors that add up over
    layers, or of the text.

    Results stay bit-identical, and nothing waits for the device. A rank measures its own part of each layer. Experts
    that are stacked in one parameter are not measured: the default implementations do not round their inputs.

    Args:
        module: the model, before its first forward.
        rules: how its weights are quantized; without rounded inputs nothing is measured.
    """

    def __init__(self, module: nn.Module, rules: Quantization | None) -> None:
        self._squares: dict[str, torch.Tensor] = {}  # [2] of error and product by layer, on the device
        self._handles: dict[str, RemovableHandle] = {}
        if rules is None or not rules.activations:
            return
        for name, layer in module.named_modules():
            if type(layer) in (nn.Linear, Conv1D):
                # Before the hooks that sum over ranks and that release streamed weights.
                measure = partial(self._measure, name)
                self._handles[name] = layer.register_forward_hook(measure, prepend=True, with_kwargs=True)

    def by_layer(self) -> dict[str, float]:
        """Return the errors so far by the layers' names, and stop measuring; waits for the device.

        Layers that gave infinities or NaN are left out: their rows fail.
        """
        for handle in [*self._handles.values()]:
            handle.remove()
        self._handles.clear()
        if not (squares := dict(self._squares)):
            return {}
        squares_L2 = torch.stack([*squares.values()])
        errors_L = (squares_L2[:, 0] / squares_L2[:, 1].clamp(min=torch.finfo(torch.float64).tiny)).sqrt().tolist()
        is_finite_L = squares_L2.isfinite().all(dim=1).tolist()
        found = zip(squares, errors_L, is_finite_L, strict=True)
        return {name: error for name, error, is_finite in found if is_finite}

    def _measure(
        self, name: str, layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: torch.Tensor
    ) -> None:
        [x] = (*args, *kwargs.values())
        # A forward without tokens is an expert's that none chose. In a capture nothing is computed.
        if x.numel() == 0 or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        if (handle := self._handles.pop(name, None)) is not None:
            handle.remove()
        weight, bias = layer._parameters["weight"], layer._parameters.get("bias")
        if isinstance(weight, QuantizedParameter) and weight.quantizes_input:
            self._squares[name] = _squares(x, weight.matrix, bias, output)


def _squares(x: torch.Tensor, matrix: QuantizedMatrix, bias: torch.Tensor | None, output: torch.Tensor) -> torch.Tensor:
    """Return the squared norms of the error of a product and of the exact product, [2] in float64.

    Args:
        x: [..., columns].
        bias: [rows].
        output: [..., rows], of x, the matrix and the bias.
    """
    step = -(-x.numel() // matrix.columns // _MOST_TOKENS)
    x_TC = x.reshape(-1, matrix.columns)[::step].float()
    rounded_TR = output.reshape(-1, matrix.rows)[::step]
    squares = torch.zeros(2, dtype=torch.float64, device=x.device)
    slices = [*matrix.slices(_SLICE_ELEMENTS)]
    for rows in slices[:: -(-len(slices) // _MOST_SLICES)]:
        exact_TR = x_TC @ dequantize_ref(matrix.part(rows), torch.float32).T
        error_TR = rounded_TR[:, rows].float() - exact_TR
        error_TR = error_TR if bias is None else error_TR - bias[rows].float()
        squares += torch.stack([error_TR.double().square().sum(), exact_TR.double().square().sum()])
    return squares
