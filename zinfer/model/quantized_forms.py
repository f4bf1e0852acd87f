"""Decides which of a model's parameters are stored quantized, and in what form."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from transformers.pytorch_utils import Conv1D

from zinfer.config.quantization_rules import Quantization
from zinfer.errors import ConfigError
from zinfer.kernels.quantize import full_range, least_error_range
from zinfer.offload.block import SlabTensor
from zinfer.quantization.conversion import Rounding, Squares
from zinfer.quantization.slab_matrix import SlabMatrix

log = logging.getLogger(__name__)

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
        shape = tuple(parameter.shape)
        plain = SlabTensor(name, parameter.dtype, shape)
        if (
            rules is None
            or len(shape) not in (2, 3)
            or not parameter.is_floating_point()
            or isinstance(module, nn.Embedding | _ConvNd)
        ):
            return plain
        transposed = isinstance(module, Conv1D)
        columns = shape[0] if transposed else shape[-1]
        format = rules.format_for(name, parameter.numel() // max(columns, 1), columns)
        if format is None:
            return plain
        if rules.groups_rows(name):
            if len(shape) == 3:
                raise ConfigError(
                    f"group_dim = 0: {name} holds several matrices one below the other, whose rows cannot share "
                    "scales; set it to 1, or leave the parameter out (zinfer.quantization.exclude)"
                )
            transposed = not transposed
        if scales_columns and isinstance(module, nn.Linear | Conv1D):
            format = replace(format, scales_columns=True)
        place = SlabMatrix(
            name,
            parameter.dtype,
            shape,
            format=format,
            transposed=transposed,
            quantizes_input=rules.activations,
        )
        return place.arranged

    return form


def find_rounding(rules: Quantization | None, squares: Squares | None = None) -> Rounding:
    """Return the rounding of weights under these rules."""
    return Rounding(least_error_range if rules is not None and rules.search == "clip" else full_range, squares)


def check_patterns(rules: Quantization | None, model: nn.Module) -> None:
    """Refuse patterns of the rules that match no parameter's name.

    Patterns of `post_init_quant` are only logged: DeepSpeed uses one configuration for several families.

    Raises:
        ConfigError: a pattern of `include` or `exclude` matches nothing.
    """
    if rules is None:
        return
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    for pattern in rules.patterns_without_a_match(names):
        fault = f"the pattern {pattern!r} occurs in no parameter of this model, whose names are like "
        fault += names[len(names) // 2]
        if pattern not in (*rules.include, *rules.exclude):
            log.warning("post_init_quant: %s; nothing is quantized by it", fault)
        else:
            raise ConfigError(f"quantization: {fault}; correct it, or remove it")
