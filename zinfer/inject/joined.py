"""Weights that lie one behind the other, seen as one: no byte is copied."""

from collections.abc import Sequence
from typing import Final

import torch
from torch import nn

from zinfer.kernels.quantized import QuantizedMatrix
from zinfer.quantization.parameter import QuantizedParameter

_PARTS: Final = ("codes", "scales", "zeros")  # that have a row for each of the matrix


def joined_parameter(parameters: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """Weights or biases as one, [rows of all, ...], if they lie so and are of one kind; else None."""
    if all(type(each) is nn.Parameter for each in parameters):
        return joined([each.detach() for each in parameters if each is not None])
    quantized = [each for each in parameters if isinstance(each, QuantizedParameter)]
    if len(quantized) < len(parameters):
        return None
    matrices, first = [each.matrix for each in quantized], quantized[0]
    kinds = {(each.matrix.format, each.matrix.columns, each.quantizes_input, each.transposed) for each in quantized}
    has_own_columns = first.matrix.column_scales is not None or first.matrix.column_order is not None
    if len(kinds) > 1 or first.transposed or first.dim() != 2 or has_own_columns:
        return None
    there = [name for name in _PARTS if getattr(first.matrix, name) is not None]
    found = {name: joined([getattr(matrix, name) for matrix in matrices]) for name in there}
    parts = {name: part for name, part in found.items() if part is not None}
    if len(parts) < len(there):
        return None
    one = QuantizedMatrix(first.matrix.format, first.matrix.columns, **parts)
    return QuantizedParameter.make(one, (one.rows, one.columns), quantizes_input=first.quantizes_input)


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """One tensor over the memory of several, [rows of all, ...], where they lie one behind the other; else None."""
    first = tensors[0]
    end, storage = first.data_ptr(), first.untyped_storage().data_ptr()
    for each in tensors:
        is_next = each.is_contiguous() and each.data_ptr() == end and each.untyped_storage().data_ptr() == storage
        if not (is_next and each.dtype == first.dtype and each.shape[1:] == first.shape[1:]):
            return None
        end += each.nbytes
    return first.as_strided((sum(each.shape[0] for each in tensors), *first.shape[1:]), first.stride())


def place_of(parameter: torch.Tensor | None) -> object:
    """Where a parameter's values lie."""
    if isinstance(parameter, QuantizedParameter):
        return parameter.matrix.codes.data_ptr(), parameter.matrix.scales.data_ptr()
    return None if parameter is None else parameter.data_ptr()
