"""Quantized weights of a checkpoint: the tensors that store each matrix, and the way from them into a slab.

A block's weights are quantized while they are loaded, or converted if the checkpoint holds them quantized.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm, prod
from pathlib import Path
from typing import Final, Protocol, TypeAlias

import torch

from zinfer.errors import CheckpointError
from zinfer.kernels.dequantize import dequantize
from zinfer.kernels.quantize import Bounds, CannotQuantize, full_range, quantize_into
from zinfer.kernels.quantized import QuantFormat, QuantizedMatrix
from zinfer.kernels.scaling import scale_columns_into
from zinfer.offload.block import SlabLayout, SlabTensor
from zinfer.weights import Checkpoint, TensorEntry
from zinfer.weights.checkpoint import read_config
from zinfer.weights.formats import Scheme, find_scheme
from zinfer.weights.formats.gguf import EncodedTensor, decode_pieces
from zinfer.weights.formats.packing import GridToRows
from zinfer.weights.formats.scheme import PATH, Encoding, least_cut
from zinfer.weights.header import parse_object
from zinfer.weights.native import METHOD, StoreScheme
from zinfer.weights.slab_matrix import SlabMatrix

MODELOPT_NAME: Final = "hf_quant_config.json"
"""Where nvidia-modelopt states what others state in config.json."""


def find_stored_scheme(checkpoint: Checkpoint) -> Scheme | None:
    """Return how the checkpoint stores quantized weights; None if they are not quantized, or if it is a list of files.

    Raises:
        CheckpointError: the scheme is not supported.
    """
    if checkpoint.is_listed:
        return None
    config = parse_object(checkpoint.config_path.read_bytes(), lenient=True)
    text = config.get("text_config")
    if PATH not in config and isinstance(text, dict):  # as Kimi-K2.5
        config = text
    section = config.get(PATH)
    if isinstance(section, dict) and section.get("quant_method") == METHOD:
        return StoreScheme.open(checkpoint.folder)
    beside = checkpoint.folder / MODELOPT_NAME
    if section is None and beside.is_file():
        of_file = read_config(beside).get("quantization")
        config |= {PATH: {"quant_method": "modelopt", **of_file} if isinstance(of_file, dict) else of_file}
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
        encoding: what the parts hold.
        parts: the tensors by the encoding's names for them.
        format, rows, columns: of the resulting matrix.
    """

    name: str
    encoding: Encoding
    parts: tuple[tuple[str, StoredPart], ...]
    format: QuantFormat
    rows: int
    columns: int

    @classmethod
    def of(cls, parameter: str, scheme: Scheme, parts: Mapping[str, TensorEntry]) -> StoredMatrix:
        """Make the matrix from a scheme's parts. Raises CheckpointError if these contradict each other."""
        made = scheme.matrix(parameter, parts)
        return cls(parameter, made.encoding, tuple(made.parts.items()), made.format, made.rows, made.columns)

    def is_kept_by(self, tensor: SlabMatrix) -> bool:
        """Return whether a slab's matrix has its codes; else it is quantized again."""
        return tensor.format == self.format or not self.encoding.is_native

    def read(self, parts: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Iterator[QuantizedMatrix]:
        """Yield the matrices that it consists of, for products in a dtype; it needs no conversion.

        Args:
            parts: the values of its parts.
        """
        assert self.encoding.is_native
        yield QuantizedMatrix(self.format, self.columns, dtype, **parts)

    @property
    def converted(self) -> StoredMatrix:
        """The matrix with a scale a row and group, in the dtype of products, where it has a grid of E4M3; else itself.

        Stacks of matrices whose rows end within a block are made so, and products that quantize their input.
        """
        if not self.format.in_grid or self.format.bits == 4:
            return self
        encoding = GridToRows(self.format)
        format = encoding.rows_format(self.columns)
        return StoredMatrix(self.name, encoding, self.parts, format, self.rows, self.columns)

    def placed(self, tensor: SlabMatrix) -> Iterator[tuple[StoredPart, SlabTensor]]:
        """Yield the parts of a matrix that needs no conversion, and the place of each in a slab."""
        assert self.encoding.is_native
        pieces = [dict(matrix.parts) for matrix in self.pieces]
        for part in tensor.parts():
            begin = part.offset
            for parts in pieces:
                entry = parts[part.name.removeprefix(f"{tensor.name}.")]
                yield entry, replace(part, offset=begin)
                begin += prod(entry.shape) * part.dtype.itemsize
            assert begin == part.end, f"{tensor.name} has just the bytes of its pieces"

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.rows, self.columns)

    @property
    def pieces(self) -> tuple[StoredMatrix, ...]:
        """The matrices that it consists of: itself."""
        return (self,)

    @property
    def units(self) -> Units:
        """What is cut together, because it shares a scale or a word."""
        rows, columns = ([each] for each in least_cut(self.format))
        for part, entry in self.parts:
            grid = self.encoding.grid(self.format, self.rows, part, entry.shape)
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
            self.encoding.convert_into(target, parts)
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
    def join(cls, name: str, shape: tuple[int, ...], matrices: Sequence[StoredMatrix]) -> JoinedMatrix | None:
        """Return the parameter ``name`` of ``shape``; None if the matrices do not form it."""
        first = matrices[0]
        is_whole = sum(matrix.rows for matrix in matrices) == prod(shape[:-1])
        if not is_whole or any(matrix.columns != shape[-1] for matrix in matrices):
            return None
        format = _format_of_stack(first)
        is_one = all(matrix.format == first.format for matrix in matrices)
        if not is_one or not all(format.can_follow(matrix.rows) for matrix in matrices[:-1]):
            others = [matrix.converted for matrix in matrices]
            return cls.join(name, shape, others) if others != list(matrices) else None
        if format.orders_columns:
            return None
        parts = tuple(
            (f"{index}.{part}", entry) for index, matrix in enumerate(matrices) for part, entry in matrix.parts
        )
        return cls(name, first.encoding, parts, format, prod(shape[:-1]), shape[-1], tuple(matrices))

    @property
    def pieces(self) -> tuple[StoredMatrix, ...]:
        return self.matrices

    def read(self, parts: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Iterator[QuantizedMatrix]:
        for index, matrix in enumerate(self.matrices):
            yield from matrix.read({part: parts[f"{index}.{part}"] for part, _ in matrix.parts}, dtype)

    @property
    def converted(self) -> StoredMatrix:
        others = [matrix.converted for matrix in self.matrices]
        if others == list(self.matrices):
            return self
        joined = JoinedMatrix.join(self.name, (self.rows, self.columns), others)
        assert joined is not None, f"matrices of {self.name} are converted to one format"
        return joined

    @property
    def units(self) -> Units:
        several = [matrix.units for matrix in self.matrices]
        return Units(lcm(*(each.rows for each in several)), lcm(*(each.columns for each in several)))

    def convert_into(self, target: QuantizedMatrix, parts: Mapping[str, torch.Tensor]) -> None:
        begin = 0
        for index, matrix in enumerate(self.matrices):
            rows = target.part(slice(begin, begin + matrix.rows))
            bands = matrix.format.group_rows, matrix.format.outer_rows
            own = replace(rows, format=replace(rows.format, group_rows=bands[0], outer_rows=bands[1]))
            matrix.convert_into(own, {part: parts[f"{index}.{part}"] for part, _ in matrix.parts})
            begin += matrix.rows


def _format_of_stack(first: StoredMatrix) -> QuantFormat:
    """Return the format of matrices like the first that lie one below the other."""
    format = first.format
    if format.group_rows is None:  # a scale per tensor: each row still stores it, or in a grid each tensor
        format = replace(format, group_rows=first.rows if format.in_grid else 1)
    return format if format.outer is None else replace(format, outer_rows=format.outer_rows or first.rows)


_SLICE_ELEMENTS: Final = 4 << 20  # quantized again at a time

Squares: TypeAlias = Callable[[str], torch.Tensor | None]
"""Returns the mean square of each input column of a parameter's product, [columns]; None: it was never used."""


@dataclass(frozen=True)
class Rounding:
    """Rounds to nearest.

    Args:
        bounds: the range that the codes of a group cover.
        squares: results of a calibration, used only for formats that scale columns; None: no calibration.
    """

    bounds: Bounds = full_range
    squares: Squares | None = None

    def into(self, target: QuantizedMatrix, matrix: torch.Tensor, parameter: str) -> None:
        """Quantize ``matrix`` [rows, columns] into ``target``; ``parameter`` is the parameter's name in the model.

        Raises:
            CannotQuantize: as `quantize_into`.
        """
        squares = self.squares(parameter) if self.squares and target.column_scales is not None else None
        if squares is not None:
            scale_columns_into(target, matrix, squares, self.bounds)
            return
        if target.column_scales is not None:
            target.column_scales.fill_(1)
        quantize_into(target, matrix, self.bounds)


NEAREST: Final = Rounding()
"""Rounds to nearest over the full range, without calibration."""


@dataclass(frozen=True)
class Quantizing:
    """Fills a block's slab with quantized matrices, and copies its other tensors.

    Args:
        block: its name, for messages.
        stored: layout of the source: full weights under their names in ``layout``, and the parts of ``matrices``.
        layout: of the slab.
        matrices: those that the checkpoint holds quantized, by their names in ``layout``.
        encoded: parameters that are decoded, by their names in ``layout``; `stored` has their blocks, numbered.
        names: of parameters in the model, by their names in ``layout``.
    """

    block: str
    stored: SlabLayout
    layout: SlabLayout
    matrices: Mapping[str, StoredMatrix]
    encoded: Mapping[str, EncodedTensor]
    rounding: Rounding
    names: Mapping[str, str]

    def __call__(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Fill ``target`` from ``source``, both uint8 and on one device.

        Raises:
            CheckpointError: a weight cannot be quantized; names it.
        """
        weights = {tensor.name: tensor.view(source) for tensor in self.stored.tensors}
        for tensor in self.layout.tensors:
            stored = self.matrices.get(tensor.name)
            if stored is not None:
                assert isinstance(tensor, SlabMatrix)
                parts = {part: weights[f"{tensor.name}.{part}"] for part, _ in stored.parts}
                if stored.is_kept_by(tensor):
                    stored.convert_into(tensor.matrix(target), parts)
                else:
                    self._quantize_again(tensor, stored, parts, target)
            elif (encoded := self.encoded.get(tensor.name)) is not None:
                blocks = [weights[f"{tensor.name}.{number}"] for number in range(len(encoded.blocks))]
                if isinstance(tensor, SlabMatrix):
                    values = torch.empty(tensor.shape, dtype=tensor.dtype, device=target.device)
                    decode_pieces(encoded.forms, values, blocks)
                    self._quantize(tensor, values, target)
                else:
                    decode_pieces(encoded.forms, tensor.view(target), blocks)
            elif isinstance(tensor, SlabMatrix):
                self._quantize(tensor, weights[tensor.name], target)
            else:
                tensor.view(target).copy_(weights[tensor.name])

    def _quantize(self, tensor: SlabMatrix, weight: torch.Tensor, target: torch.Tensor) -> None:
        is_of_several = tensor.transposed and weight.dim() == 3  # one at a time takes less memory
        self._round(tensor, weight.transpose(1, 2) if is_of_several else [tensor.rows_of(weight)], target)

    def _quantize_again(
        self, tensor: SlabMatrix, stored: StoredMatrix, parts: Mapping[str, torch.Tensor], target: torch.Tensor
    ) -> None:
        """Quantize the values that a published matrix stands for, a slice of them at a time."""
        format = tensor.format
        is_sliced = format.group_rows == 1 and not format.scales_columns and not format.in_fragments

        def values() -> Iterator[torch.Tensor]:
            for matrix in stored.read(parts, torch.float32):
                for rows in matrix.slices(_SLICE_ELEMENTS) if is_sliced else [slice(0, matrix.rows)]:
                    yield dequantize(matrix.part(rows))

        self._round(tensor, values(), target)

    def _round(self, tensor: SlabMatrix, pieces: Iterable[torch.Tensor], target: torch.Tensor) -> None:
        """Quantize pieces of a matrix, [rows, columns] of each, that lie one below the other."""
        matrix, begin = tensor.matrix(target), 0
        try:
            for rows in pieces:
                part = matrix.part(slice(begin, begin + len(rows)))
                self.rounding.into(part, rows, self.names.get(tensor.name, tensor.name))
                begin += len(rows)
        except CannotQuantize as error:
            raise CheckpointError(
                f"{self.block}: {tensor.name} cannot be quantized: {error}; leave it out "
                f"(zinfer.quantization.exclude), or repair the checkpoint"
            ) from error
