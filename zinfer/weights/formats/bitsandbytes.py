"""bitsandbytes checkpoints with 8 bits (LLM.int8), whose 4-bit ones are refused.

For a linear layer of ``rows`` outputs and ``columns`` inputs (bitsandbytes/nn/modules.py: `Linear8bitLt`):

weight: int8 [rows, columns];
SCB: float32 [rows], the largest magnitude of each row; a value is weight * SCB / 127;
weight_format: the order of the codes; 0 is that of rows.
"""

from collections.abc import Mapping, Sequence
from typing import Final, Literal

import torch

from zinfer.config.quantization_rules import Quantization, QuantRule
from zinfer.errors import CheckpointError
from zinfer.kernels.quantized import QuantFormat, QuantizedMatrix
from zinfer.weights.formats.packing import fill_scales
from zinfer.weights.formats.scheme import (
    REMEDY,
    Axis,
    Encoding,
    ForeignScheme,
    Layout,
    PartGrid,
    Shapes,
    check_dtypes,
    matrix_shape,
)

_LARGEST_CODE: Final = 127


class BitsAndBytes(ForeignScheme, Encoding):
    """Weights with a scale a row; columns with outliers are among them, and activations stay in full precision."""

    marks = ("SCB",)

    load_in_4bit: Literal[False] = False

    @property
    def planned(self) -> Quantization:
        return Quantization((QuantRule(bits=8),))

    def part_names(self, module: str) -> tuple[Sequence[str], Sequence[str]]:
        return ("weight", "SCB"), ("weight_format",)

    def layout(self, parameter: str, shapes: Shapes) -> Layout:
        rows, columns = matrix_shape(parameter, "weight", shapes)
        return (
            QuantFormat(8),
            rows,
            columns,
            {"weight": [(rows, columns)], "SCB": [(rows,)], "weight_format": [(), (1,)]},
        )

    def grid(self, format: QuantFormat, rows: int, part: str, shape: tuple[int, ...]) -> PartGrid:
        if part == "weight":
            return PartGrid(shape, Axis(0), Axis(1))
        return PartGrid(shape, Axis(0)) if part == "SCB" else PartGrid(shape)

    def convert_into(self, target: QuantizedMatrix, parts: Mapping[str, torch.Tensor]) -> None:
        check_dtypes(parts, {"weight": (torch.int8,), "SCB": (torch.float32,)})
        order = parts.get("weight_format")
        if order is not None and bool(order.any()):
            raise CheckpointError(f"weight_format is {int(order.max())}, not the order of rows (0); {REMEDY}")
        fill_scales(target, (parts["SCB"] / _LARGEST_CODE).unsqueeze(1), "SCB")
        target.codes.copy_(parts["weight"])
