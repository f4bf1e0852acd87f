"""A quantized matrix as one tensor of a slab: codes, scales and other parts, each aligned to 256 bytes.

Apart from the file that fills it, because a plan of a published model is made without torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING

from zinfer.config.quantization_rules import Quantization
from zinfer.errors import ConfigError
from zinfer.kernels.quantized import QuantFormat, QuantizedMatrix
from zinfer.nvme.aligned import align_up
from zinfer.offload.block import SLAB_ALIGNMENT_BYTES, Block, SlabLayout, SlabTensor

if TYPE_CHECKING:
    import torch

    from zinfer.weights.parameter import QuantizedParameter


def most_dequantized_bytes(blocks: Iterable[Block]) -> int:
    """Return the dequantized size of the largest quantized matrix; 0 if there is none."""
    return max((block.layout.max_dequantized_bytes for block in blocks), default=0)


@dataclass(frozen=True)
class SlabMatrix(SlabTensor):
    """The layout of a quantized parameter in a slab; ``dtype`` and ``shape`` are those that its module sees.

    Args:
        transposed: the module holds the matrix's transpose, [columns, rows]; of stacked ones the transpose of each.
        quantizes_input: products quantize their input too.
        part_offsets: where its parts begin; by default one after another from ``offset`` on.
    """

    format: QuantFormat = field(kw_only=True)
    transposed: bool = field(default=False, kw_only=True)
    quantizes_input: bool = field(default=False, kw_only=True)
    part_offsets: tuple[int, ...] = field(default=(), kw_only=True)

    @property
    def dequantized_bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def rows(self) -> int:
        """Rows of all matrices, which are stacked one below the other."""
        return prod(self.shape[:-2]) * self.shape[-1] if self.transposed else self.numel // max(self.shape[-1], 1)

    @property
    def columns(self) -> int:
        return self.shape[-2] if self.transposed else self.shape[-1]

    @property
    def nbytes(self) -> int:
        return sum(
            align_up(prod(shape) * self.format.part_itemsize(name, self.dtype.itemsize), SLAB_ALIGNMENT_BYTES)
            for name, shape in self.format.part_shapes(self.rows, self.columns).items()
        )

    @property
    def end(self) -> int:
        if not self.part_offsets:
            return self.offset + self.nbytes
        return align_up(max(part.end for part in self.parts()), SLAB_ALIGNMENT_BYTES)

    @property
    def arranged(self) -> SlabMatrix:
        """The matrix with codes and scales in the order that products need, stacked matrices one by one."""
        rows = self.shape[-1] if self.transposed else self.shape[-2]
        return replace(self, format=self.format.arranged(rows, self.columns))

    def rows_of(self, weight: torch.Tensor) -> torch.Tensor:
        """Return a full weight, of the parameter's shape, as the matrix [rows, columns]."""
        return (weight.transpose(-1, -2) if self.transposed else weight).reshape(self.rows, self.columns)

    def matrix(self, slab: torch.Tensor) -> QuantizedMatrix:
        """Return the matrix as views of the slab's bytes (uint8)."""
        views = {part.name.removeprefix(f"{self.name}."): part.view(slab) for part in self.parts()}
        return QuantizedMatrix(self.format, self.columns, self.dtype, **views)

    def parameter(self, slab: torch.Tensor) -> QuantizedParameter:
        from zinfer.weights.parameter import QuantizedParameter

        matrix, picked = self.matrix(slab), None
        if self.format.picks_columns:
            matrix, picked = replace(matrix, column_order=None), matrix.column_order
        made = QuantizedParameter.make(
            matrix, self.shape, transposed=self.transposed, quantizes_input=self.quantizes_input
        )
        made.picked = picked
        return made

    def parts(self) -> list[SlabTensor]:
        """Return the tensors that the matrix consists of."""
        parts: list[SlabTensor] = []
        offset = self.offset
        for index, (name, shape) in enumerate(self.format.part_shapes(self.rows, self.columns).items()):
            dtype = self.format.part_dtype(name, self.dtype)
            begin = self.part_offsets[index] if self.part_offsets else offset
            parts.append(SlabTensor(f"{self.name}.{name}", dtype, shape, begin))
            offset = align_up(parts[-1].end, SLAB_ALIGNMENT_BYTES)
        return parts


def quantized_form(
    rules: Quantization | None, tensor: SlabTensor, *, transposed: bool = False, scales_columns: bool = False
) -> SlabTensor:
    """Return the form of a parameter in a slab: as codes and scales if it is a matrix that matches a rule.

    Args:
        tensor: the parameter in full precision, under its name in the model.
        transposed: its module holds the matrix's transpose, or those of several.
        scales_columns: the matrix has column scales, from a calibration.

    Raises:
        ConfigError: the groups of a matching rule do not divide the matrix, or would span rows of several.
    """
    shape = tensor.shape
    if rules is None or len(shape) not in (2, 3) or not tensor.dtype.is_floating_point:
        return tensor
    columns = shape[-2] if transposed else shape[-1]
    format = rules.format_for(tensor.name, tensor.numel // max(columns, 1), columns)
    if format is None:
        return tensor
    if rules.groups_rows(tensor.name):
        if len(shape) == 3:
            raise ConfigError(
                f"group_dim = 0: {tensor.name} holds several matrices one below the other, whose rows cannot share "
                "scales; set it to 1, or leave the parameter out (zinfer.quantization.exclude)"
            )
        transposed = not transposed
    if scales_columns:
        format = replace(format, scales_columns=True)
    return SlabMatrix(
        tensor.name,
        tensor.dtype,
        shape,
        format=format,
        transposed=transposed,
        quantizes_input=rules.activations,
    ).arranged


def are_rows_of_one(tensors: Sequence[SlabTensor]) -> bool:
    """Return whether matrices, full or quantized, would form one matrix if they were adjacent in memory."""
    first = tensors[0]
    if not isinstance(first, SlabMatrix):
        return all(type(each) is SlabTensor and each.dtype == first.dtype for each in tensors)
    matrices = [each for each in tensors if isinstance(each, SlabMatrix) and len(each.shape) == 2]
    kinds = {(each.dtype, each.format, each.columns, each.transposed, each.quantizes_input) for each in matrices}
    are_alike = len(matrices) == len(tensors) and len(kinds) == 1
    are_alike = are_alike and all(each.format.can_follow(each.rows) for each in matrices[:-1])
    return are_alike and not (first.transposed or first.format.scales_columns or first.format.orders_columns)


def interleave(layout: SlabLayout, packs: Iterable[Sequence[str]]) -> SlabLayout:
    """Return the layout with the codes of each pack's quantized matrices adjacent, then their scales, and so on."""
    tensors = {tensor.name: tensor for tensor in layout.tensors}
    for names in packs:
        matrices = [tensor for name in names if isinstance(tensor := tensors.get(name), SlabMatrix)]
        if not matrices or len(matrices) < len(names) or not are_rows_of_one(matrices):
            continue
        assert all(one.end == other.offset for one, other in pairwise(matrices)), "a pack is adjacent"
        offset, begins = matrices[0].offset, list[list[int]]()
        for kind in zip(*(matrix.parts() for matrix in matrices), strict=True):
            begins.append([])
            for part in kind:
                begins[-1].append(offset)
                offset += part.nbytes
                if not matrices[0].format.in_grid:  # whose parts may have any size, and need not begin at a multiple
                    offset = align_up(offset, SLAB_ALIGNMENT_BYTES)
            offset = align_up(offset, SLAB_ALIGNMENT_BYTES)
        for matrix, own in zip(matrices, zip(*begins, strict=True), strict=True):
            tensors[matrix.name] = replace(matrix, offset=own[0], part_offsets=own)
    return SlabLayout(tuple(tensors.values()))
