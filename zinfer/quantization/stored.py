"""A quantized parameter in a checkpoint: several tensors that a scheme converts into one matrix."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm, prod
from pathlib import Path
from typing import Protocol

import torch

from zinfer.checkpoint import Checkpoint, TensorEntry
from zinfer.checkpoint.json_text import parse_object
from zinfer.errors import CheckpointError
from zinfer.kernels.quantized import QuantFormat, QuantizedMatrix
from zinfer.quantization.foreign import Scheme, find_scheme
from zinfer.quantization.grid import least_cut
from zinfer.quantization.native.manifest import METHOD
from zinfer.quantization.native.scheme import StoreScheme


def find_stored_scheme(checkpoint: Checkpoint) -> Scheme | None:
    """Return how the checkpoint stores quantized weights; None if they are not quantized, or if it is a list of files.

    Raises:
        CheckpointError: the scheme is not supported.
    """
    if checkpoint.is_listed:
        return None
    config = parse_object(checkpoint.config_path.read_bytes(), lenient=True)
    section = config.get("quantization_config")
    if isinstance(section, dict) and section.get("quant_method") == METHOD:
        return StoreScheme.open(checkpoint.folder)
    return find_scheme(config)


class StoredPart(Protocol):
    """A tensor of a checkpoint, or the ranges of one that a rank reads."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def file(self) -> Path: ...
    @property
    def offset(self) -> int: ...
    @property
    def pieces(self) -> tuple[TensorEntry, ...]: ...


@dataclass(frozen=True)
class Units:
    """Rows, and columns, of a matrix that are cut together. ``is_ordered``: columns in the order of their groups."""

    rows: int
    columns: int
    is_ordered: bool = False


@dataclass(frozen=True, eq=False)
class StoredMatrix:
    """The parts of one parameter.

    Attributes:
        name: of the parameter in the checkpoint.
        scheme: what the parts mean.
        parts: the tensors by the scheme's names for them.
        format, rows, columns: of the resulting matrix.
    """

    name: str
    scheme: Scheme
    parts: tuple[tuple[str, StoredPart], ...]
    format: QuantFormat
    rows: int
    columns: int

    @classmethod
    def of(cls, parameter: str, scheme: Scheme, parts: Mapping[str, TensorEntry]) -> "StoredMatrix":
        """Make the matrix from a scheme's parts. Raises CheckpointError if their shapes contradict each other."""
        shapes = {part: entry.shape for part, entry in parts.items()}
        format, rows, columns = scheme.format_of(parameter, shapes)
        return cls(parameter, scheme, tuple(parts.items()), format, rows, columns)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.rows, self.columns)

    @property
    def pieces(self) -> "tuple[StoredMatrix, ...]":
        """The matrices that it consists of: itself."""
        return (self,)

    @property
    def units(self) -> Units:
        """What is cut together, because it shares a scale or a word."""
        rows, columns = ([each] for each in least_cut(self.format))
        for part, entry in self.parts:
            grid = self.scheme.grid(self.format, self.rows, part, entry.shape)
            rows += [grid.rows.step] if grid.rows else []
            columns += [grid.columns.step] if grid.columns else []
        return Units(lcm(*rows), lcm(*columns), self.format.orders_columns)

    @property
    def file(self) -> Path:
        """The file of its first part."""
        return self._first.file

    @property
    def offset(self) -> int:
        return self._first.offset

    def convert_into(self, target: QuantizedMatrix, parts: Mapping[str, torch.Tensor]) -> None:
        """Fill ``target`` from the parts' values.

        Raises:
            CheckpointError: the format cannot represent their values; names the parameter and its file.
        """
        try:
            self.scheme.convert_into(target, parts)
        except CheckpointError as error:
            raise CheckpointError(f"{self.file}: {self.name}: {error}") from error

    @property
    def _first(self) -> StoredPart:
        return min((entry for _, entry in self.parts), key=lambda entry: (str(entry.file), entry.offset))


@dataclass(frozen=True, eq=False)
class JoinedMatrix(StoredMatrix):
    """A stack of separately quantized matrices, such as the experts of a mixture.

    Names of parts are prefixed with the matrix's number.
    """

    matrices: tuple[StoredMatrix, ...]

    @classmethod
    def join(cls, name: str, shape: tuple[int, ...], matrices: Sequence[StoredMatrix]) -> "JoinedMatrix | None":
        """Return the parameter ``name`` of ``shape``; None if the matrices do not form it."""
        first = matrices[0]
        is_whole = sum(matrix.rows for matrix in matrices) == prod(shape[:-1])
        if not is_whole or any(matrix.columns != shape[-1] for matrix in matrices):
            return None
        if any(matrix.format != first.format for matrix in matrices) or first.format.orders_columns:
            return None
        format = first.format
        if format.group_rows is None:  # a scale per tensor: each row still stores it
            format = replace(format, group_rows=1)
        parts = tuple(
            (f"{index}.{part}", entry) for index, matrix in enumerate(matrices) for part, entry in matrix.parts
        )
        return cls(name, first.scheme, parts, format, prod(shape[:-1]), shape[-1], tuple(matrices))

    @property
    def pieces(self) -> tuple[StoredMatrix, ...]:
        return self.matrices

    @property
    def units(self) -> Units:
        several = [matrix.units for matrix in self.matrices]
        return Units(lcm(*(each.rows for each in several)), lcm(*(each.columns for each in several)))

    def convert_into(self, target: QuantizedMatrix, parts: Mapping[str, torch.Tensor]) -> None:
        begin = 0
        for index, matrix in enumerate(self.matrices):
            rows = target.part(slice(begin, begin + matrix.rows))
            own = replace(rows, format=replace(rows.format, group_rows=matrix.format.group_rows))
            matrix.convert_into(own, {part: parts[f"{index}.{part}"] for part, _ in matrix.parts})
            begin += matrix.rows
