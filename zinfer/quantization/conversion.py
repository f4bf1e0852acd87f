"""Quantizes a block's weights while they are loaded, or converts weights that the checkpoint holds quantized."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch

from zinfer.errors import CheckpointError
from zinfer.kernels.quantize import Bounds, CannotQuantize, full_range, quantize_into
from zinfer.kernels.quantized import QuantizedMatrix
from zinfer.kernels.scaling import scale_columns_into
from zinfer.offload.block import SlabLayout
from zinfer.quantization.slab_matrix import SlabMatrix
from zinfer.quantization.stored import StoredMatrix

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
        names: of parameters in the model, by their names in ``layout``.
    """

    block: str
    stored: SlabLayout
    layout: SlabLayout
    matrices: Mapping[str, StoredMatrix]
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
                stored.convert_into(tensor.matrix(target), parts)
            elif isinstance(tensor, SlabMatrix):
                self._quantize(tensor, weights[tensor.name], target)
            else:
                tensor.view(target).copy_(weights[tensor.name])

    def _quantize(self, tensor: SlabMatrix, weight: torch.Tensor, target: torch.Tensor) -> None:
        rows = weight.t() if tensor.transposed else weight.view(tensor.rows, tensor.columns)
        try:
            self.rounding.into(tensor.matrix(target), rows, self.names.get(tensor.name, tensor.name))
        except CannotQuantize as error:
            raise CheckpointError(
                f"{self.block}: {tensor.name} cannot be quantized: {error}; leave it out "
                f"(zinfer.quantization.exclude), or repair the checkpoint"
            ) from error
