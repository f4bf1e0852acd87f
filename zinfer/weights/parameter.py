"""A parameter that holds quantized codes instead of a full weight.

`torch.nn.functional.linear` and similar functions multiply with the codes; other operators get the dequantized matrix,
so every architecture computes correct results.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from zinfer.kernels.dequantize import dequantize
from zinfer.kernels.fp8_linear import fp8_linear
from zinfer.kernels.int8_linear import int8_linear
from zinfer.kernels.quantized import QuantizedMatrix
from zinfer.kernels.quantized_linear import is_fused, quantized_linear


class QuantizedParameter(nn.Parameter):
    """A parameter that consists of codes and scales.

    Its shape is the one that the module expects: [rows, columns], [columns, rows], or for several stacked matrices
    [number, rows of each, columns].

    Attributes:
        matrix: [rows, columns], as stored.
        transposed: the parameter is the matrix's transpose, [columns, rows] (transformers' Conv1D), or holds the
            transpose of each of several.
        quantizes_input: products quantize their input as the weights are, to INT8 (as in ZeroQuant) or FP8.
        picked: the columns of a wider input that are this matrix's, [columns]; None: all, as they are.
    """

    matrix: QuantizedMatrix
    transposed: bool
    quantizes_input: bool
    picked: torch.Tensor | None

    @staticmethod
    def make(
        matrix: QuantizedMatrix, shape: Sequence[int], *, transposed: bool = False, quantizes_input: bool = False
    ) -> "QuantizedParameter":
        """Return a parameter of ``shape`` that shares the matrix's memory."""
        made = torch.Tensor._make_wrapper_subclass(
            QuantizedParameter, tuple(shape), dtype=matrix.dtype, device=matrix.codes.device
        )
        assert isinstance(made, QuantizedParameter)
        made.matrix, made.transposed, made.quantizes_input = matrix, transposed, quantizes_input
        made.picked = None
        return made

    def multiplied(self, input: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return ``input @ matrix.T + bias``, [..., rows], for ``input`` [..., columns]."""
        if not self.quantizes_input:
            return quantized_linear(input, self.matrix, bias)
        return (fp8_linear if self.matrix.format.is_float else int8_linear)(input, self.matrix, bias)

    def multiplies_codes(self, tokens: int) -> bool:
        """Return whether a product with this many tokens needs no memory for a dequantized matrix."""
        return self.quantizes_input or is_fused(self.matrix, tokens)

    def dequantized(self) -> torch.Tensor:
        """Return the full weight in a new tensor."""
        values = dequantize(self.matrix)
        if not self.transposed:
            return values.view(self.shape)
        return values.view(*self.shape[:-2], self.shape[-1], self.shape[-2]).transpose(-1, -2)

    def part(self, index: int) -> "QuantizedParameter":
        """Return one of several stacked matrices."""
        num_matrices, *shape = self.shape
        rows = shape[1] if self.transposed else shape[0]
        if not -num_matrices <= index < num_matrices:
            raise IndexError(f"index {index} is out of range for {num_matrices} matrices")
        begin = index % num_matrices * rows
        part = self.matrix.part(slice(begin, begin + rows))
        return QuantizedParameter.make(part, shape, transposed=self.transposed, quantizes_input=self.quantizes_input)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        product = _PRODUCTS.get(func)
        if product is not None:
            result = product(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch calls it with the class and the function
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten.detach.default:  # state_dict() detaches what it lists; the device may be full
            assert isinstance(args[0], QuantizedParameter)
            return args[0].dequantized().cpu()
        full = tree_map_only(QuantizedParameter, QuantizedParameter.dequantized, (tuple(args), dict(kwargs or {})))
        return func(*full[0], **full[1])


def _linear(input: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> Any:
    if not isinstance(weight, QuantizedParameter) or weight.transposed or weight.dim() != 2:
        return NotImplemented
    return weight.multiplied(input, bias)


def _addmm(input: torch.Tensor, mat1: torch.Tensor, mat2: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    """Return ``input + mat1 @ mat2`` as transformers' Conv1D calls it, where ``input`` is the bias."""
    is_product = isinstance(mat2, QuantizedParameter) and mat2.transposed and beta == alpha == 1 and input.dim() == 1
    return mat2.multiplied(mat1, input) if is_product else NotImplemented


def _getitem(weight: Any, index: Any) -> Any:
    is_one_of_several = isinstance(weight, QuantizedParameter) and weight.dim() == 3
    if not is_one_of_several or not isinstance(index, int | torch.Tensor):
        return NotImplemented
    if isinstance(index, torch.Tensor) and (index.dim() or index.dtype == torch.bool):
        return NotImplemented
    return weight.part(int(index))


def _transposed(weight: Any) -> Any:
    """Return a transposed parameter over the same codes: a module may compute ``input @ weight.T``."""
    if not isinstance(weight, QuantizedParameter) or weight.dim() != 2:
        return NotImplemented
    shape, transposed = (weight.shape[1], weight.shape[0]), not weight.transposed
    return QuantizedParameter.make(weight.matrix, shape, transposed=transposed, quantizes_input=weight.quantizes_input)


def _matmul(input: Any, other: Any) -> Any:
    is_matrix = isinstance(other, QuantizedParameter) and other.dim() == 2
    is_product = is_matrix and other.transposed and input.dim() > 1
    return other.multiplied(input, None) if is_product else NotImplemented


_PRODUCTS: dict[Callable[..., Any], Callable[..., Any]] = {
    nn.functional.linear: _linear,
    torch.addmm: _addmm,
    torch.Tensor.__getitem__: _getitem,
    torch.Tensor.T.__get__: _transposed,  # type: ignore[attr-defined]
    torch.Tensor.t: _transposed,
    torch.t: _transposed,
    torch.matmul: _matmul,
    torch.Tensor.matmul: _matmul,
    torch.Tensor.__matmul__: _matmul,
}
