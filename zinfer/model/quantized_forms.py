"""Which of a model's parameters are stored quantized, and how their modules hold them."""

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
"""Gives a parameter its place in a slab, at offset 0: from its name, the module that holds it, and the parameter."""


def find_form(rules: Quantization | None, *, scales_columns: bool = False) -> Form:
    """The places that parameters get in their slabs: matrices that the rules name as codes and scales, others in full.

    Matrices are the weights of linear layers (transformers' Conv1D holds them transposed) and those that experts hold
    one below the other; tables that are looked up and not multiplied with stay as they are, and convolutions.

    Args:
        rules: None: all stay in full.
        scales_columns: the weights of linear layers, whose inputs a calibration can see, have scales of columns.

    Returns:
        the form; it raises ConfigError where a rule names a parameter and its groups do not divide it, or are of rows
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
    """How weights are rounded under these rules."""
    return Rounding(least_error_range if rules is not None and rules.search == "clip" else full_range, squares)


def check_patterns(rules: Quantization | None, model: nn.Module) -> None:
    """Look for patterns of the rules that occur in no parameter's name and would change nothing, unseen.

    Those of `post_init_quant` are told in the log: DeepSpeed takes one configuration for several families.

    Raises:
        ConfigError: one of `include` or `exclude` occurs nowhere.
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
