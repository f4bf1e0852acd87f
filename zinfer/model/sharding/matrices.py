"""A rank's part of a matrix that the checkpoint holds quantized: ranges of its codes, scales and zeros.

Where columns are in activation order (desc_act, actorder), those that share a scale are scattered. A range of groups is
cut there: the part has the same format, and needs the columns of its groups, wherever they are in the input.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

import torch

from zinfer.checkpoint import TensorEntry
from zinfer.errors import ConfigError
from zinfer.kernels.quantized import QuantizedMatrix
from zinfer.model.sharding.cut import Cut
from zinfer.model.sharding.weights import CutTensor
from zinfer.quantization.foreign.filling import fill_groups
from zinfer.quantization.stored import JoinedMatrix, StoredMatrix, StoredPart


def cut_matrix(whole: StoredMatrix, cut: Cut, shape: tuple[int, ...], *, transposed: bool) -> StoredMatrix:
    """Return a rank's part of a stored parameter.

    Args:
        cut: of the parameter.
        shape: of the whole parameter: [rows, columns], or several matrices of [rows, columns].
        transposed: the parameter is the matrix's transpose.

    Raises:
        ConfigError: the cut would divide what shares a scale or a word.
    """
    dim = matrix_dim(cut.dim, len(shape), transposed=transposed)
    own = Cut(dim, cut.ranges if dim or transposed else tuple(_row_ranges(cut, shape)))
    if not isinstance(whole, JoinedMatrix):
        return CutMatrix.make(whole, own)
    matrices = whole.matrices
    cuts = [own] * len(matrices) if dim else [Cut(0, ranges) for ranges in _within(matrices, own)]
    made = [CutMatrix.make(matrix, each) for matrix, each in zip(matrices, cuts, strict=True) if each.ranges]
    joined = JoinedMatrix.join(whole.name, cut.shape(shape), made)
    assert joined is not None, f"parts of {whole.name} are matrices of one format and width"
    return joined


def matrix_dim(dim: int, num_dims: int, *, transposed: bool) -> int:
    """Return whether a parameter's dimension holds rows (0) or columns (1) of its matrix."""
    return int((dim == num_dims - 1) != transposed)


def _row_ranges(cut: Cut, shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Yield the rows of matrices that lie one below the other."""
    inner, each = prod(shape[cut.dim + 1 : -1]), prod(shape[cut.dim : -1])
    for number in range(prod(shape[: cut.dim])):
        yield from ((number * each + begin * inner, number * each + end * inner) for begin, end in cut.ranges)


def _within(matrices: tuple[StoredMatrix, ...], cut: Cut) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yield the ranges of rows within each of several matrices."""
    at = 0
    for matrix in matrices:
        ends = ((max(begin - at, 0), min(end - at, matrix.rows)) for begin, end in cut.ranges)
        yield tuple((begin, end) for begin, end in ends if begin < end)
        at += matrix.rows


@dataclass(frozen=True, eq=False)
class CutMatrix(StoredMatrix):
    """Ranges of the rows or the columns of a stored matrix.

    Attributes:
        whole: the matrix.
        cut: of its rows (0) or its columns (1), these in the order of their groups.
    """

    whole: StoredMatrix
    cut: Cut

    @classmethod
    def make(cls, whole: StoredMatrix, cut: Cut) -> "CutMatrix":
        """Cut a matrix. Raises ConfigError as `cut_matrix`."""
        _check_ends(whole, cut)
        picks = bool(cut.dim) and whole.format.orders_columns
        format = replace(whole.format, picks_columns=picks or whole.format.picks_columns)
        parts = whole.parts
        if whole.scheme.is_native or not picks:  # other tools store columns in their first order
            parts = tuple((part, _cut_part(whole, part, entry, cut)) for part, entry in whole.parts)
        rows, columns = cut.shape(whole.shape)
        return cls(whole.name, whole.scheme, parts, format, rows, columns, whole, cut)

    def convert_into(self, target: QuantizedMatrix, parts: Mapping[str, torch.Tensor]) -> None:
        if self.format.picks_columns and not self.scheme.is_native:
            device = next(iter(parts.values())).device
            whole = QuantizedMatrix.empty(self.whole.format, self.whole.rows, self.whole.columns, target.dtype, device)
            self.whole.convert_into(whole, parts)
            ((begin, end),) = self.cut.ranges
            fill_groups(target, whole, begin, end)
            return
        ranges = self.cut.ranges if self.cut.dim else ((0, self.columns),)
        own = torch.cat([torch.arange(begin, end) for begin, end in ranges])
        super().convert_into(target, self.scheme.of_cut(parts, self.whole.rows, self.whole.columns, own))


def _cut_part(whole: StoredMatrix, part: str, entry: StoredPart, cut: Cut) -> StoredPart:
    assert isinstance(entry, TensorEntry), "a matrix is cut once"
    grid = whole.scheme.grid(whole.format, whole.rows, part, entry.shape)
    axis = grid.columns if cut.dim else grid.rows
    if axis is None:
        return entry
    ranges = tuple((begin // axis.step, -(-end // axis.step)) for begin, end in cut.ranges)
    return CutTensor(replace(entry, shape=grid.shape), Cut(axis.dim, ranges))


def _check_ends(whole: StoredMatrix, cut: Cut) -> None:
    length, units = whole.shape[cut.dim], whole.units
    unit = units.columns if cut.dim else units.rows
    ends = [end for ends in cut.ranges for end in ends if end % unit and end != length]
    if not ends:
        return
    raise ConfigError(
        f"tensor_parallel.tp_size: {whole.file} holds {whole.name} quantized; its {length} "
        f"{('rows', 'columns')[cut.dim]} share words or scales in {unit}s, and a rank's would end at {ends[0]}; choose "
        "a size that cuts it elsewhere, or leave the key out: the ranks then share the weights"
    )
