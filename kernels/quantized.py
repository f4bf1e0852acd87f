"""Quantized matrices: what a format is, and the tensors that a matrix in it consists of.

A matrix has shape [rows, columns]: rows are output channels, columns are what a product sums over, as in the weight of
`nn.Linear`. An element's value is ``(code - zero) * scale``; a scale, and a zero where the format is asymmetric, serve
``group_size`` neighbouring columns of one row.

codes:  [rows, columns] int8 (symmetric 8 bits), uint8 (asymmetric 8 bits) or float8_e4m3fn;
        [rows, ceil(columns / 2)] uint8 (4 bits): column 2j in the low half of byte j, column 2j + 1 in the high half.
scales: [rows, groups] in the dtype that products are computed in.
zeros:  [rows, groups] uint8, asymmetric formats only. 4 bits without zeros: 8 stands for nothing.
column_scales: [columns] in the dtype of scales, formats that scale columns only: each value is multiplied by its
        column's, which a product does to what it multiplies with (Lin et al. 2023, "AWQ").
column_order: [columns] int32, formats that order columns only: which column of the matrix is stored as each, so that
        groups of columns that lie apart (GPTQ's desc_act) are neighbours; scales of columns are in the stored order.
"""

from dataclasses import dataclass, replace
from typing import Final, Literal

import torch

SYMMETRIC_INT4_ZERO: Final = 8
FLOAT8: Final = torch.float8_e4m3fn


@dataclass(frozen=True)
class QuantFormat:
    """How a matrix is stored.

    Args:
        bits: 4 or 8.
        group_size: columns that share a scale, a divisor of the columns; None: a whole row shares one.
        symmetric: without zero points.
        is_float: 8 bits as e4m3 floating point (Micikevicius et al. 2022, "FP8 formats for deep learning").
        group_rows: neighbouring rows that share their scales, which are then stored once a row all the same; None: all
            rows, with ``group_size`` None a scale per tensor.
        scales_columns: each column has a scale of its own, beside those of the groups.
        orders_columns: columns are stored in an order of their own.

    Raises:
        ValueError: no such format.
    """

    bits: Literal[4, 8]
    group_size: int | None = None
    symmetric: bool = True
    is_float: bool = False
    group_rows: int | None = 1
    scales_columns: bool = False
    orders_columns: bool = False

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise ValueError(f"bits must be 4 or 8, not {self.bits}")
        if self.is_float and (self.bits != 8 or not self.symmetric):
            raise ValueError("a floating-point format has 8 bits and is symmetric")
        for name in ("group_size", "group_rows"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise ValueError(f"{name} must be at least 1, not {size}")

    @property
    def multiplies_int8(self) -> bool:
        """Whether INT8 tensor cores can multiply the codes, and a row's scale the sums."""
        return self.bits == 8 and self.symmetric and not self.is_float and self.group_size is None

    @property
    def codes_dtype(self) -> torch.dtype:
        if self.is_float:
            return FLOAT8
        return torch.int8 if self.bits == 8 and self.symmetric else torch.uint8

    @property
    def code_range(self) -> tuple[float, float]:
        """The least and the largest code, as a multiple of the scale above the zero; symmetric ones about 0."""
        if self.is_float:
            largest = torch.finfo(FLOAT8).max
            return -largest, largest
        if self.symmetric:
            largest = 2 ** (self.bits - 1) - 1
            return -largest, largest
        return 0, 2**self.bits - 1

    def check_shape(self, rows: int, columns: int) -> None:
        """Raise ValueError if a matrix of this shape cannot be stored so."""
        if self.group_size is not None and columns % self.group_size:
            raise ValueError(f"group_size {self.group_size} does not divide the {columns} columns")
        if self.group_rows is not None and rows % self.group_rows:
            raise ValueError(f"group_rows {self.group_rows} does not divide the {rows} rows")

    def num_groups(self, columns: int) -> int:
        """Scales of a row."""
        return 1 if self.group_size is None else columns // self.group_size

    def codes_shape(self, rows: int, columns: int) -> tuple[int, int]:
        return (rows, columns if self.bits == 8 else -(-columns // 2))

    def part_shapes(self, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors that a matrix consists of, by their names and in the order in which they are stored."""
        groups = (rows, self.num_groups(columns))
        optional = {
            "zeros": (not self.symmetric, groups),
            "column_scales": (self.scales_columns, (columns,)),
            "column_order": (self.orders_columns, (columns,)),
        }
        present = {name: shape for name, (is_there, shape) in optional.items() if is_there}
        return {"codes": self.codes_shape(rows, columns), "scales": groups, **present}

    def part_dtype(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """Of one of those tensors; ``dtype`` is that of scales."""
        return {"codes": self.codes_dtype, "zeros": torch.uint8, "column_order": torch.int32}.get(name, dtype)


@dataclass(frozen=True, eq=False)
class QuantizedMatrix:
    """A matrix in stored form; the tensors lie on one device and are as the module's docstring says.

    ``dtype`` is what its values are computed in: that of ``scales``.
    """

    format: QuantFormat
    columns: int
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    column_scales: torch.Tensor | None = None
    column_order: torch.Tensor | None = None

    @property
    def rows(self) -> int:
        return self.codes.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        return self.scales.dtype

    @property
    def nbytes(self) -> int:
        parts = (self.codes, self.scales, self.zeros, self.column_scales, self.column_order)
        return sum(part.nbytes for part in parts if part is not None)

    @property
    def plain(self) -> "QuantizedMatrix":
        """What a product takes once it has ordered and scaled what it multiplies with; shares the memory."""
        return replace(self, column_scales=None, column_order=None)

    def part(self, rows: slice) -> "QuantizedMatrix":
        """Some of the rows, sharing their memory."""
        zeros = None if self.zeros is None else self.zeros[rows]
        return replace(self, codes=self.codes[rows], scales=self.scales[rows], zeros=zeros)

    @classmethod
    def empty(
        cls, format: QuantFormat, rows: int, columns: int, dtype: torch.dtype, device: torch.device | str
    ) -> "QuantizedMatrix":
        """Memory for a matrix, not filled."""
        format.check_shape(rows, columns)
        parts = {
            name: torch.empty(shape, dtype=format.part_dtype(name, dtype), device=device)
            for name, shape in format.part_shapes(rows, columns).items()
        }
        return cls(format, columns, **parts)
