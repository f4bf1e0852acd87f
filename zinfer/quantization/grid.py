"""Where the rows and columns of a quantized matrix lie in the tensors that store it, so that ranks can cut them."""

from dataclasses import dataclass

from zinfer.kernels.quantized import FRAGMENT_COLUMNS, FRAGMENT_ROWS, QuantFormat

_FRAGMENT_STEP_COLUMNS = 64


@dataclass(frozen=True)
class Axis:
    """The dimension of a tensor along which rows, or columns, follow one another: ``step`` of them to an element."""

    dim: int
    step: int = 1


@dataclass(frozen=True)
class PartGrid:
    """How a part lies over its matrix.

    Attributes:
        shape: of the part, or another one of its elements in the same order, in which the axes are meant.
        rows, columns: None: the whole part serves each of them.
    """

    shape: tuple[int, ...]
    rows: Axis | None = None
    columns: Axis | None = None


def native_grid(format: QuantFormat, part: str, shape: tuple[int, ...]) -> PartGrid:
    """Return how a part of a `QuantizedMatrix` lies over it."""
    if part in ("column_scales", "column_order"):
        return PartGrid(shape, columns=Axis(0))
    codes, groups = part == "codes", None if format.group_size is None else Axis(1, format.group_size)
    if not format.in_fragments:
        columns = Axis(1, 8 // format.bits) if codes else groups
        return PartGrid(shape, Axis(0), columns)
    blocks = shape[0] // FRAGMENT_ROWS
    if not codes:
        return PartGrid((blocks, shape[1], FRAGMENT_ROWS), Axis(0, FRAGMENT_ROWS), groups)
    steps = shape[1] * 2 // _FRAGMENT_STEP_COLUMNS
    step_bytes = FRAGMENT_ROWS * _FRAGMENT_STEP_COLUMNS // 2
    return PartGrid((blocks, steps, step_bytes), Axis(0, FRAGMENT_ROWS), Axis(1, _FRAGMENT_STEP_COLUMNS))


def least_cut(format: QuantFormat) -> tuple[int, int]:
    """Return the rows, and the columns, of which a part of a matrix must have a multiple to keep its format."""
    if format.in_fragments:
        return FRAGMENT_ROWS, FRAGMENT_COLUMNS
    return format.group_rows or 1, format.group_size or 1
