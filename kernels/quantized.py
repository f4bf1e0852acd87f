"""Quantized matrices: formats, and the tensors that a matrix consists of.

A matrix has shape [rows, columns]: rows are output channels, columns are what a product sums over, as in the weight of
`nn.Linear`. An element's value is ``(code - zero) * scale``; a scale, and a zero where the format is asymmetric, serve
``group_size`` neighbouring columns of one row.

codes:  [rows, columns] int8 (symmetric 8 bits), uint8 (asymmetric 8 bits) or float8_e4m3fn;
        [rows, ceil(columns / 2)] uint8 (4 bits): column 2j in the low half of byte j, column 2j + 1 in the high half.
        A code of 4 bits is a whole number or, as floating point, e2m1: sign, two bits of exponent, one of mantissa.
scales: [rows, groups] in the dtype that products are computed in, or in the format's own: e8m0 is 2 ** (byte - 127).
        In a grid [ceil(rows / group_rows), ceil(columns / group_size)]: once a block, the last ones may be smaller.
outer_scales: [ceil(rows / outer_rows)] float32, only in formats with two levels of scales: scales are multiplied with,
        or divided by, those of their rows.
zeros:  [rows, groups] uint8, asymmetric formats only. In 4-bit formats of whole numbers without zeros, code 8 is zero.
column_scales: [columns] in the dtype of scales, only in formats that scale columns: each value is multiplied by its
        column's scale; a product applies them to its input (Lin et al. 2023, "AWQ").
column_order: [columns] int32, only in formats that order columns: the matrix's column in each stored position, so that
        scattered groups of columns (GPTQ's desc_act) are contiguous; scales of columns are in the stored order. Of a
        part with some of the groups: the columns of the whole matrix.

Formats in fragment order have codes and scales of the same shapes in another order, that of tensor core operands (after
Marlin, Frantar et al. 2024, arXiv 2408.11743), the same on disk, in slabs and on every device. The order applies to
whole blocks of 64 rows, which are stacked; `part` selects some blocks.

codes of a block: [columns / 64][4 tiles of 16 rows][8 rows][4][16 bytes]. Byte ``b`` of [step][tile][g][t] holds the
        codes of two rows, ``16 tile + g`` in its low half and that plus 8 in its high one, in column
        ``64 step + 32 (b // 8) + 8 t + 4 (b // 4 % 2) + (0, 2, 1, 3)[b % 4]``.
scales of a block: [groups][8 rows][4 tiles][2]: that of [group][g][tile][h] is of row ``16 tile + 8 h + g``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

if TYPE_CHECKING:  # formats need none of it: a plan of a published model is made without torch
    import torch

SYMMETRIC_INT4_ZERO: Final = 8
LARGEST_FLOAT8: Final = 448.0
FLOAT4_MAGNITUDES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The values of e2m1 codes, by their lower three bits; the fourth is the sign."""

FRAGMENT_ROWS: Final = 64
"""Rows of a block in fragment order."""
FRAGMENT_COLUMNS: Final = 256
"""Columns that a warp computes at a time: a divisor of the columns of a matrix in fragment order."""
FRAGMENT_GROUPS: Final = (64, 128, 256)
"""The possible group sizes of matrices in fragment order."""
MOST_FUSED_TOKENS: Final = 128
"""The most tokens for the fused kernel: with 256 it was slower on an H200 (benchmarks/kernels.py)."""

ScaleDtype: TypeAlias = Literal["float32", "bfloat16", "float16", "float8_e8m0fnu", "float8_e4m3fn"]
_SCALE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e8m0fnu": 1, "float8_e4m3fn": 1}


@dataclass(frozen=True)
class QuantFormat:
    """How a matrix is stored.

    Args:
        bits: 4 or 8.
        group_size: columns that share a scale, a divisor of the columns; None: a whole row shares one.
        symmetric: without zero points.
        is_float: floating point: 8 bits as e4m3 (Micikevicius et al. 2022, "FP8 formats for deep learning"), 4 bits as
            e2m1 (OCP Microscaling Formats, 2023).
        group_rows: neighbouring rows that share their scales, which are still stored once per row; None: all rows, and
            with ``group_size`` None a scale per tensor.
        scales_columns: each column has its own scale, beside those of the groups.
        orders_columns: columns are stored in another order.
        picks_columns: the matrix is a part with some groups of a wider one, in the stored order, whose ``column_order``
            names the columns of the wider one. Its input has the picked columns alone.
        in_fragments: codes and scales are in fragment order; `arranged` decides for which matrices.
        scale_dtype: of scales as they are stored; None: the dtype of products.
        in_grid: scales are stored once a block of ``group_rows`` rows and ``group_size`` columns, which need not divide
            the matrix.
        outer: scales are multiplied with ("times") or divided by ("over") those of the second level.
        outer_rows: neighbouring rows with the same scale of the second level: those of each stacked matrix; None: all.

    Raises:
        ValueError: there is no such format.
    """

    bits: Literal[4, 8]
    group_size: int | None = None
    symmetric: bool = True
    is_float: bool = False
    group_rows: int | None = 1
    scales_columns: bool = False
    orders_columns: bool = False
    picks_columns: bool = False
    in_fragments: bool = False
    scale_dtype: ScaleDtype | None = None
    in_grid: bool = False
    outer: Literal["times", "over"] | None = None
    outer_rows: int | None = None

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise ValueError(f"bits must be 4 or 8, not {self.bits}")
        if (self.is_float or self.in_grid) and not self.symmetric:
            raise ValueError("floating-point formats, and those with a grid of scales, are symmetric")
        for name in ("group_size", "group_rows", "outer_rows"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise ValueError(f"{name} must be at least 1, not {size}")
        if self.picks_columns and not self.orders_columns:
            raise ValueError("columns are picked in the order that they are stored in")
        if self.in_fragments and not self._may_lie_in_fragments:
            raise ValueError(f"fragments hold 4 bits, symmetric, in groups of {FRAGMENT_GROUPS}, not {self}")

    @property
    def _may_lie_in_fragments(self) -> bool:
        is_int4 = self.bits == 4 and self.symmetric and not self.is_float
        return is_int4 and self.has_plain_scales and self.group_size in FRAGMENT_GROUPS

    @property
    def has_plain_scales(self) -> bool:
        """Whether each row has its own scales, of one level, in the dtype of products."""
        return self.scale_dtype is None and not self.in_grid and self.outer is None

    def arranged(self, rows: int, columns: int) -> QuantFormat:
        """Return the format in the order for products with a matrix of this shape: fragment order where possible.

        For several stacked matrices, ``rows`` are those of each, so that each has whole blocks.
        """
        is_whole = rows % FRAGMENT_ROWS == 0 and columns % FRAGMENT_COLUMNS == 0
        return replace(self, in_fragments=self._may_lie_in_fragments and is_whole)

    @property
    def multiplies_int8(self) -> bool:
        """Whether INT8 tensor cores can multiply the codes, with one scale per row."""
        is_int8 = self.bits == 8 and self.symmetric and not self.is_float
        return is_int8 and self.group_size is None and not self.in_grid and self.outer is None

    @property
    def multiplies_fp8(self) -> bool:
        """Whether FP8 tensor cores can multiply the codes, with one scale per row, which rows may share."""
        return self.is_float and self.bits == 8 and self.group_size is None and self.outer is None

    @property
    def codes_dtype(self) -> torch.dtype:
        import torch

        if self.is_float and self.bits == 8:
            return torch.float8_e4m3fn
        return torch.int8 if self.bits == 8 and self.symmetric else torch.uint8

    @property
    def code_range(self) -> tuple[float, float]:
        """The least and the largest code, in multiples of the scale above the zero; about 0 if symmetric."""
        if self.is_float:
            largest_float = LARGEST_FLOAT8 if self.bits == 8 else FLOAT4_MAGNITUDES[-1]
            return -largest_float, largest_float
        if self.symmetric:
            largest = 2 ** (self.bits - 1) - 1
            return -largest, largest
        return 0, 2**self.bits - 1

    def check_shape(self, rows: int, columns: int) -> None:
        """Raise ValueError if a matrix of this shape cannot be stored in this format."""
        if self.group_size is not None and columns % self.group_size and not self.in_grid:
            raise ValueError(f"group_size {self.group_size} does not divide the {columns} columns")
        if self.group_rows is not None and rows % self.group_rows and not self.in_grid:
            raise ValueError(f"group_rows {self.group_rows} does not divide the {rows} rows")
        if self.in_fragments and (rows % FRAGMENT_ROWS or columns % FRAGMENT_COLUMNS):
            raise ValueError(
                f"fragments of {FRAGMENT_ROWS} rows and {FRAGMENT_COLUMNS} columns do not divide {rows} rows and "
                f"{columns} columns"
            )

    def num_groups(self, columns: int) -> int:
        """Return the number of scales of a row."""
        return 1 if self.group_size is None else -(-columns // self.group_size)

    def can_follow(self, rows: int) -> bool:
        """Return whether another matrix of the format can lie below one with so many rows, as one matrix."""
        return all(band is not None and rows % band == 0 for band in self._bands)

    @property
    def _bands(self) -> tuple[int | None, ...]:
        """The numbers of neighbouring rows that share something stored; None: all rows."""
        return (self.group_rows,) * self.in_grid + (self.outer_rows,) * (self.outer is not None)

    def part_shapes(self, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a matrix's tensors, by name and in the order in which they are stored."""
        groups = (_num_bands(rows, self.group_rows) if self.in_grid else rows, self.num_groups(columns))
        optional = {
            "outer_scales": (self.outer is not None, (_num_bands(rows, self.outer_rows),)),
            "zeros": (not self.symmetric, groups),
            "column_scales": (self.scales_columns, (columns,)),
            "column_order": (self.orders_columns, (columns,)),
        }
        present = {name: shape for name, (is_there, shape) in optional.items() if is_there}
        codes = (rows, columns if self.bits == 8 else -(-columns // 2))
        return {"codes": codes, "scales": groups, **present}

    def part_itemsize(self, name: str, itemsize: int) -> int:
        """Return the bytes of an element of one of those tensors; ``itemsize`` is that of the dtype of products."""
        scale_bytes = itemsize if self.scale_dtype is None else _SCALE_BYTES[self.scale_dtype]
        known = {"codes": 1, "scales": scale_bytes, "outer_scales": 4, "zeros": 1, "column_order": 4}
        return known.get(name, itemsize)

    def part_dtype(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of one of those tensors; ``dtype`` is that of products."""
        import torch

        scales: torch.dtype = dtype if self.scale_dtype is None else getattr(torch, self.scale_dtype)
        known = {
            "codes": self.codes_dtype,
            "scales": scales,
            "outer_scales": torch.float32,
            "zeros": torch.uint8,
            "column_order": torch.int32,
        }
        return known.get(name, dtype)


def _num_bands(rows: int, band: int | None) -> int:
    return -(-rows // band) if band is not None else min(rows, 1)


@dataclass(frozen=True, eq=False)
class QuantizedMatrix:
    """A quantized matrix: tensors on one device, as in the module's docstring; ``dtype`` is that of products."""

    format: QuantFormat
    columns: int
    dtype: torch.dtype
    codes: torch.Tensor
    scales: torch.Tensor
    outer_scales: torch.Tensor | None = None
    zeros: torch.Tensor | None = None
    column_scales: torch.Tensor | None = None
    column_order: torch.Tensor | None = None

    @property
    def rows(self) -> int:
        return self.codes.shape[0]

    @property
    def nbytes(self) -> int:
        parts = (self.codes, self.scales, self.outer_scales, self.zeros, self.column_scales, self.column_order)
        return sum(part.nbytes for part in parts if part is not None)

    @property
    def plain(self) -> QuantizedMatrix:
        """Return the matrix for a product whose input is already ordered and scaled; shares the memory."""
        return replace(self, column_scales=None, column_order=None)

    def part(self, rows: slice) -> QuantizedMatrix:
        """Return some of the rows, sharing their memory.

        In fragment order, whole blocks. Where rows share scales that are stored once: from a first row of those that
        share one on, or within them.
        """
        begin, end, _ = rows.indices(self.rows)
        assert not self.format.in_fragments or begin % FRAGMENT_ROWS == end % FRAGMENT_ROWS == 0
        group_rows = self.format.group_rows if self.format.in_grid else 1
        zeros = None if self.zeros is None else self.zeros[rows]
        outer = None if self.outer_scales is None else self.outer_scales[_sharing(begin, end, self.format.outer_rows)]
        scales = self.scales[_sharing(begin, end, group_rows)]
        return replace(self, codes=self.codes[rows], scales=scales, outer_scales=outer, zeros=zeros)

    def slices(self, most_elements: int, unit: int = 1) -> Iterator[slice]:
        """Yield slices of about ``most_elements``, of which each is a `part`, in multiples of ``unit`` rows.

        Slices are smaller where rows that share scales end.
        """
        bands = [band for band in self.format._bands if band is not None]
        unit = math.lcm(unit, FRAGMENT_ROWS if self.format.in_fragments else 1)
        count = max(1, most_elements // max(self.columns * unit, 1)) * unit
        shared = math.lcm(unit, *(band for band in bands if band <= count))
        count -= count % shared if count >= shared else 0
        begin = 0
        while begin < self.rows:
            ends = [band - begin % band for band in bands if begin % band]
            end = min(begin + min([count, *ends]), self.rows)
            yield slice(begin, end)
            begin = end

    @classmethod
    def empty(
        cls, format: QuantFormat, rows: int, columns: int, dtype: torch.dtype, device: torch.device | str
    ) -> QuantizedMatrix:
        """Allocate memory for a matrix, uninitialized."""
        import torch

        format.check_shape(rows, columns)
        parts = {
            name: torch.empty(shape, dtype=format.part_dtype(name, dtype), device=device)
            for name, shape in format.part_shapes(rows, columns).items()
        }
        return cls(format, columns, dtype, **parts)


def _sharing(begin: int, end: int, band: int | None) -> slice:
    """Return which of the scales that ``band`` rows share are those of some rows."""
    if band is None or begin >= end:
        return slice(0, begin < end)
    first = begin // band
    assert begin % band == 0 or end <= (first + 1) * band, "a part begins within rows that share a scale, and goes on"
    return slice(first, -(-end // band))
