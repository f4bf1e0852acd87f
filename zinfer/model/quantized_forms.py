"""Decides which of a model's parameters are stored quantized, and in what form."""

from collections.abc import Callable
from typing import Final, TypeAlias

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from transformers.pytorch_utils import Conv1D

from zinfer.config.quantization_rules import Quantization
from zinfer.kernels.quantize import full_range, least_error_range
from zinfer.offload.block import SlabTensor
from zinfer.weights.quantized import Rounding, Squares
from zinfer.weights.slab_matrix import quantized_form

KEPT_MODULES: Final = (nn.Embedding, _ConvNd)
"""Modules whose weights are never quantized."""

Form: TypeAlias = Callable[[str, nn.Module, torch.Tensor], SlabTensor]
"""Returns a parameter's slab tensor at offset 0, from its name, its module, and the parameter."""


def find_form(rules: Quantization | None, *, scales_columns: bool = False) -> Form:
    """Return the form of parameters in slabs: matrices that match a rule as codes and scales, others in full.

    Matrices are the weights of linear layers (transposed in transformers' Conv1D) and the stacked ones of experts.
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
        return quantized_form(rules, plain, transposed=isinstance(module, Conv1D), scales_columns=has_scales)

    return form


def find_rounding(rules: Quantization | None, squares: Squares | None = None) -> Rounding:
    """Return the rounding of weights under these rules."""
    return Rounding(least_error_range if rules is not None and rules.search == "clip" else full_range, squares)
