"""How full weights become codes: what range those cover, and which columns have to come out the most exact."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch

from zinfer.kernels.quantize import Bounds, full_range, quantize_into
from zinfer.kernels.quantized import QuantizedMatrix
from zinfer.kernels.scaling import scale_columns_into

Squares: TypeAlias = Callable[[str], torch.Tensor | None]
"""The mean square of each column of what a parameter is multiplied with, [columns]; None: it was never seen."""


@dataclass(frozen=True)
class Rounding:
    """Rounds to nearest.

    Args:
        bounds: the range that the codes of a group cover.
        squares: what a calibration has seen; only formats that scale columns ask for it. None: nothing.
    """

    bounds: Bounds = full_range
    squares: Squares | None = None

    def into(self, target: QuantizedMatrix, matrix: torch.Tensor, parameter: str) -> None:
        """Fill ``target`` with ``matrix`` [rows, columns] of a parameter, by its name in the model.

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
"""To nearest, and nothing else."""
