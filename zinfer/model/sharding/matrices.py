"""A rank's part of a matrix that the checkpoint holds quantized: ranges of its codes, scales and zeros.

Where columns are in activation order (desc_act, actorder), those that share a scale are scattered. A range of groups is
cut there: the part has the same format, and needs the columns of its groups, wherever they are in the input.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

import torch

from zinfer.errors import ConfigError
from zinfer.kernels.quantized import QuantizedMatrix
from zinfer.model.sharding.cut import Cut
from zinfer.model.sharding.weights import CutTensor
from zinfer.weights import TensorEntry
from zinfer.weights.formats.packing import fill_groups
from zinfer.weights.formats.scheme import Axis
from zinfer.weights.quantized import JoinedMatrix, StoredMatrix, StoredPart


def cut_matrix(whole: StoredMatrix, cut: Cut, shape: tuple[int, ...], *, transposed: bool) -> StoredMatrix:
    """Return a rank's part of a stored parameter.

    Args:
        cut: of the parameter.
        shape: of the whole parameter: [rows, columns], or several matrices of [rows, columns].
        transposed: the parameter is the matrix's transpose, or holds those of several.

    Raises:
        ConfigError: the cut would divide what shares a scale or a word.
    """
    if transposed and len(shape) == 3:  # seen as the matrices lie, each [rows, columns]
        cut, shape = replace(cut, dim=(0, 2, 1)[cut.dim]), (shape[0], shape[2], shape[1])
        transposed = False
    if matrix_dim(cut.dim, len(shape), transposed=transposed):
        own = Cut(1, cut.ranges, cut.within and _rows_of(shape, *cut.within))
    else:
        own = Cut(0, cut.ranges if transposed else tuple(_row_ranges(cut, shape)))
    if not isinstance(whole, JoinedMatrix):
        return CutMatrix.make(whole, own)
    made = [CutMatrix.make(matrix, each) for matrix, each in _within(whole, own)]
    joined = JoinedMatrix.join(whole.name, cut.shape(shape), made)
    assert joined is not None, f"parts of {whole.name} are matrices of one format and width"
    return joined


def matrix_dim(dim: int, num_dims: int, *, transposed: bool) -> int:
    """Return whether a parameter's dimension holds rows (0), also of several matrices, or columns (1)."""
    return int(dim >= num_dims - 2 and (dim == num_dims - 1) != transposed)


def _row_ranges(cut: Cut, shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Yield the rows of matrices that lie one below the other."""
    inner, each = prod(shape[cut.dim + 1 : -1]), prod(shape[cut.dim : -1])
    rows = _rows_of(shape, *cut.within) if cut.within else (0, prod(shape[:-1]))
    for number in range(rows[0] // each, rows[1] // each):
        yield from ((number * each + begin * inner, number * each + end * inner) for begin, end in cut.ranges)


def _rows_of(shape: tuple[int, ...], begin: int, end: int) -> tuple[int, int]:
    """Return the rows of a range of the first dimension."""
    each = prod(shape[1:-1])
    return begin * each, end * each


def _within(whole: JoinedMatrix, cut: Cut) -> Iterator[tuple[StoredMatrix, Cut]]:
    """Yield the matrices that have some of the rows, and what is left of each."""
    at = 0
    for matrix in whole.matrices:
        rows = (cut.within or (0, whole.rows),) if cut.dim else cut.ranges
        ends = ((max(begin - at, 0), min(end - at, matrix.rows)) for begin, end in rows)
        if own := tuple((begin, end) for begin, end in ends if begin < end):
            is_all = own == ((0, matrix.rows),)
            yield matrix, Cut(1, cut.ranges, None if is_all else own[0]) if cut.dim else Cut(0, own)
        at += matrix.rows


@dataclass(frozen=True, eq=False)
class CutMatrix(StoredMatrix):
    """Ranges of the rows or the columns of a stored matrix.

    Attributes:
        whole: the matrix.
        cut: of its rows (0) or, perhaps within a range of rows, its columns (1), these in the order of their groups.
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
        if whole.encoding.is_native or not picks:  # other tools store columns in their first order
            parts = tuple((part, _cut_part(whole, part, entry, cut)) for part, entry in whole.parts)
        rows, columns = cut.shape(whole.shape)
        return cls(whole.name, whole.encoding, parts, format, rows, columns, whole, cut)

    def convert_into(self, target: QuantizedMatrix, parts: Mapping[str, torch.Tensor]) -> None:
        if self.format.picks_columns and not self.encoding.is_native:
            device = next(iter(parts.values())).device
            whole = QuantizedMatrix.empty(self.whole.format, self.whole.rows, self.whole.columns, target.dtype, device)
            self.whole.convert_into(whole, parts)
            ((begin, end),) = self.cut.ranges
            fill_groups(target, whole, begin, end)
            return
        ranges = self.cut.ranges if self.cut.dim else ((0, self.columns),)
        own = torch.cat([torch.arange(begin, end) for begin, end in ranges])
        super().convert_into(target, self.encoding.of_cut(parts, self.whole.rows, self.whole.columns, own))


def _cut_part(whole: StoredMatrix, part: str, entry: StoredPart, cut: Cut) -> StoredPart:
    assert isinstance(entry, TensorEntry), "a matrix is cut once"
    grid = whole.encoding.grid(whole.format, whole.rows, part, entry.shape)
    axis = grid.columns if cut.dim else grid.rows
    within: tuple[int, int] | None = None
    if cut.within is not None and grid.rows is not None:
        assert grid.rows.dim == 0, "stacked matrices are stored one below the other"
        (within,) = _places(grid.rows, (cut.within,))
    if axis is not None:
        return CutTensor(replace(entry, shape=grid.shape), Cut(axis.dim, _places(axis, cut.ranges), within))
    return entry if within is None else CutTensor(replace(entry, shape=grid.shape), Cut(0, (within,)))


def _places(axis: Axis, ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    return tuple((begin // axis.step, -(-end // axis.step)) for begin, end in ranges)


def _check_ends(whole: StoredMatrix, cut: Cut) -> None:
    if cut.within is not None:
        _check_ends(whole, Cut(0, (cut.within,)))
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
