"""Decides which of a model's parameters are stored quantized, and in what form; and quantizes a module in memory."""

from collections.abc import Callable
from typing import Final, Literal, TypeAlias, TypeVar

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from transformers.pytorch_utils import Conv1D

from zinfer.config.quantization_rules import Quantization, QuantizationType, QuantRule
from zinfer.errors import CheckpointError, ConfigError
from zinfer.kernels.quantize import CannotQuantize, full_range, least_error_range, quantize
from zinfer.model.matching import holds_transpose
from zinfer.offload.block import SlabTensor
from zinfer.weights.parameter import QuantizedParameter
from zinfer.weights.quantized import Rounding, Squares
from zinfer.weights.slab_matrix import SlabMatrix, quantized_form

KEPT_MODULES: Final = (nn.Embedding, _ConvNd)
"""Modules whose weights are never quantized."""

Form: TypeAlias = Callable[[str, nn.Module, torch.Tensor], SlabTensor]
"""Returns a parameter's slab tensor at offset 0, from its name, its module, and the parameter."""


def find_form(rules: Quantization | None, *, scales_columns: bool = False) -> Form:
    """Return the form of parameters in slabs: matrices that match a rule as codes and scales, others in full.

    Matrices are the weights of linear layers and the stacked ones of experts; some modules hold their transposes.
    Embeddings and convolutions are never quantized.

    Args:
        rules: None: nothing is quantized.
        scales_columns: whether weights of linear layers, whose inputs a calibration sees, have column scales.

    Returns:
        the form; it raises ConfigError if the groups of a matching rule do not divide a parameter, or would span rows
        of several matrices.
    """

    def form(name: str, module: nn.Module, parameter: torch.Tensor) -> SlabTensor:
        plain = SlabTensor(name, parameter.dtype, tuple(parameter.shape))
        if isinstance(module, KEPT_MODULES):
            return plain
        has_scales = scales_columns and isinstance(module, nn.Linear | Conv1D)
        transposed = holds_transpose(module, parameter.dim())
        return quantized_form(rules, plain, transposed=transposed, scales_columns=has_scales)

    return form


def find_rounding(rules: Quantization | None, squares: Squares | None = None) -> Rounding:
    """Return the rounding of weights under these rules."""
    return Rounding(least_error_range if rules is not None and rules.search == "clip" else full_range, squares)


Model = TypeVar("Model", bound=nn.Module)


def quantize_transformer(
    model: Model,
    quant_bits: Literal[4, 8] = 8,
    quant_type: str = QuantizationType.SYMMETRIC,
    quant_groups: int | None = None,
) -> Model:
    """Replace the matrices of a model's layers by quantized ones; its forward stays the same.

    Each matrix is freed once it is quantized. Embeddings, norms, heads and routers stay in full precision.

    Args:
        model: changed in place, and returned; on any device.
        quant_bits: 4 or 8.
        quant_type: "symmetric", or "asymmetric" with zero points; or a `QuantizationType`.
        quant_groups: number of equal groups of each matrix, in row order, with a scale each; None: one group per
            output channel.

    Raises:
        ConfigError: an argument is invalid, or a matrix cannot be divided into so many groups.
        CheckpointError: a weight is infinite or NaN; names it.
    """
    if quant_bits not in (4, 8):
        raise ConfigError(f"quant_bits must be 4 or 8, not {quant_bits}")
    if quant_type not in tuple(QuantizationType):
        raise ConfigError(f'quant_type must be "symmetric" or "asymmetric", not {quant_type!r}')
    if quant_groups is not None and quant_groups < 1:
        raise ConfigError(f"quant_groups must be at least 1, not {quant_groups}")
    symmetric = quant_type == QuantizationType.SYMMETRIC
    rule = QuantRule(bits=quant_bits, symmetric=symmetric, num_groups=quant_groups, origin="quant_groups")
    form = find_form(Quantization((rule,)))
    done: dict[nn.Parameter, QuantizedParameter] = {}
    for path, module in model.named_modules():
        for leaf, parameter in list(module._parameters.items()):
            if parameter is None or isinstance(parameter, QuantizedParameter):
                continue
            if parameter not in done:
                name = f"{path}.{leaf}".lstrip(".")
                place = form(name, module, parameter)
                if not isinstance(place, SlabMatrix):
                    continue
                try:
                    matrix = quantize(place.rows_of(parameter.detach()), place.format)
                except CannotQuantize as error:
                    raise CheckpointError(f"{name} cannot be quantized: {error}") from error
                done[parameter] = QuantizedParameter.make(matrix, place.shape, transposed=place.transposed)
            module._parameters[leaf] = done[parameter]
    return model
