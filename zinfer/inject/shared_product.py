"""One product for several linear layers with the same input.

The layer that a module calls first computes the product for all; the others return views of its output, within that
call of the module and only for the same, unmodified input tensor. Otherwise each layer computes its own product.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional

from zinfer.kernels.quantized import QuantizedMatrix
from zinfer.weights.parameter import QuantizedParameter

_PARTS: Final = ("codes", "scales", "outer_scales", "zeros")  # with a row for each row of the matrix


class SharedProduct:
    """The product of one module's layers.

    Args:
        plain: the module's forward.
        layers: in the order in which it calls them.
        leaves: names of each layer's parameters, which are read at each call.
        multiply: computes ``x @ weight.T + bias`` from x, weight and perhaps a bias; by default torch's linear.
    """

    def __init__(
        self,
        plain: Callable[..., Any],
        layers: Sequence[nn.Linear],
        leaves: Sequence[str],
        multiply: Callable[..., torch.Tensor] | None = None,
    ) -> None:
        self._plain = plain
        self._multiply = multiply
        self._layers = tuple(layers)
        self._leaves = tuple(leaves)
        self._widths = [layer.out_features for layer in layers]
        self._begin()

    def __getstate__(self) -> dict[str, Any]:
        """Omit views of memory, which would not belong to the copy's weights."""
        names = ("_plain", "_multiply", "_layers", "_leaves", "_widths")
        return {name: self.__dict__[name] for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    def _begin(self) -> None:
        self._is_open = False
        self._places: list[object] = []
        self._operands: list[torch.Tensor] = []
        self._forget()

    def _forget(self) -> None:
        self._input: torch.Tensor | None = None
        self._version = 0
        self._parts: dict[int, torch.Tensor] = {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward; its layers share the product during the call."""
        try:
            self._is_open = True
            return self._plain(*args, **kwargs)
        finally:  # an unused part must not outlive the weights that it was computed from
            self._is_open = False
            self._forget()

    def layer_forwards(self) -> list[Callable[..., Any]]:
        """Return the forward of each layer; copied with the module."""
        return [partial(self.part, index) for index in range(len(self._layers))]

    def part(self, index: int, input: torch.Tensor) -> torch.Tensor:
        """Return one layer's output: [..., in] -> [..., out]."""
        if index == 0 and self._is_open:
            self._compute(input)
        if self._input is input and input._version == self._version and index in self._parts:
            return self._parts.pop(index)
        layer = self._layers[index]
        return self._product(input, layer.weight, layer.bias)

    def _compute(self, input: torch.Tensor) -> None:
        """Compute the parts of all layers, if their weights are adjacent in memory."""
        self._forget()
        if torch.is_grad_enabled() or input.is_inference():  # gradients are per weight; no version to compare
            return
        operands = self._joined()
        if operands and _spares_memory(operands[0], input):
            parts = torch.split(self._product(input, *operands), self._widths, dim=-1)
            self._input, self._version, self._parts = input, input._version, dict(enumerate(parts))

    def _product(self, *operands: torch.Tensor | None) -> torch.Tensor:
        return (self._multiply or functional.linear)(*operands)  # type: ignore[arg-type]

    def _joined(self) -> list[torch.Tensor]:
        """Return the layers' weights as one matrix, and their biases as one; empty if they are not adjacent."""
        parameters = [[layer._parameters[leaf] for layer in self._layers] for leaf in self._leaves]
        places = [_place_of(parameter) for several in parameters for parameter in several]
        if places != self._places:  # operands hold their memory, so no other tensor can have these addresses
            found = [joined_parameter(several) for several in parameters]
            self._operands = [each for each in found if each is not None]
            self._places = places if len(self._operands) == len(found) else []
        return self._operands if self._places else []


def _spares_memory(weight: torch.Tensor, input: torch.Tensor) -> bool:
    """Return whether the joint product needs no more memory than the layers' own; a dequantized joint matrix would."""
    tokens = input.numel() // max(input.shape[-1], 1)
    return not isinstance(weight, QuantizedParameter) or weight.multiplies_codes(tokens)


def joined_parameter(parameters: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """Return weights or biases as one, [rows of all, ...], if they are adjacent and of one kind; else None."""
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
    if not all(matrix.format.can_follow(matrix.rows) for matrix in matrices[:-1]):
        return None
    there = [name for name in _PARTS if getattr(first.matrix, name) is not None]
    found = {name: joined([getattr(matrix, name) for matrix in matrices]) for name in there}
    parts = {name: part for name, part in found.items() if part is not None}
    if len(parts) < len(there):
        return None
    one = QuantizedMatrix(first.matrix.format, first.matrix.columns, first.matrix.dtype, **parts)
    return QuantizedParameter.make(one, (one.rows, one.columns), quantizes_input=first.quantizes_input)


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return one tensor over the memory of several, [rows of all, ...], if they are adjacent; else None."""
    first = tensors[0]
    end, storage = first.data_ptr(), first.untyped_storage().data_ptr()
    for each in tensors:
        is_next = each.is_contiguous() and each.data_ptr() == end and each.untyped_storage().data_ptr() == storage
        if not (is_next and each.dtype == first.dtype and each.shape[1:] == first.shape[1:]):
            return None
        end += each.nbytes
    return first.as_strided((sum(each.shape[0] for each in tensors), *first.shape[1:]), first.stride())


def _place_of(parameter: torch.Tensor | None) -> object:
    """Return the addresses of a parameter's values."""
    if isinstance(parameter, QuantizedParameter):
        return parameter.matrix.codes.data_ptr(), parameter.matrix.scales.data_ptr()
    return None if parameter is None else parameter.data_ptr()
