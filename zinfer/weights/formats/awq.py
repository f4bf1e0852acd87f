"""AWQ checkpoints with 4 bits in the layout "gemm", as AutoAWQ and GPTQModel write them.

For a linear layer of ``rows`` outputs and ``columns`` inputs
(AutoAWQ 0.2.9, awq/modules/linear/gemm.py: `WQLinear_GEMM.from_linear`; awq/utils/packing_utils.py: `dequantize_gemm`):

qweight: int32 [columns, rows / 8]; a word holds the codes of eight successive rows of one column;
qzeros:  int32 [groups, rows / 8], likewise;
scales:  [groups, rows]; a value is (code - zero) * scale.

From the lowest bits up, a word holds its rows in the order 0, 2, 4, 6, 1, 3, 5, 7.
"""

from collections.abc import Mapping, Sequence
from typing import Final, Literal

import torch

from zinfer.config.quantization_rules import Quantization, QuantRule
from zinfer.kernels.quantized import QuantFormat, QuantizedMatrix
from zinfer.weights.formats.packing import SLICE_ELEMENTS, bytes_of, fill_codes, fill_scales, fill_zeros
from zinfer.weights.formats.scheme import (
    FLOATS,
    Axis,
    Encoding,
    ForeignScheme,
    GroupSize,
    Layout,
    PartGrid,
    Shapes,
    check_dtypes,
    group_of,
    matrix_shape,
)

_ROW_AT_NIBBLE: Final = (0, 2, 4, 6, 1, 3, 5, 7)


class Awq(ForeignScheme, Encoding):
    """Weights that AWQ's tools wrote; with ``zero_point`` false they have no zeros, or all zeros are 8."""

    marks = ("qweight", "qzeros", "scales")

    bits: Literal[4] = 4
    version: Literal["gemm"] = "gemm"
    format: Literal["gemm"] = "gemm"
    checkpoint_format: Literal["gemm"] = "gemm"
    group_size: GroupSize = 128
    zero_point: bool = True

    @property
    def planned(self) -> Quantization:
        return Quantization((QuantRule(bits=4, group_size=self.group_size, symmetric=not self.zero_point),))

    def part_names(self, module: str) -> tuple[Sequence[str], Sequence[str]]:
        return (self.marks, ()) if self.zero_point else (("qweight", "scales"), ("qzeros",))

    def layout(self, parameter: str, shapes: Shapes) -> Layout:
        columns, words = matrix_shape(parameter, "qweight", shapes)
        rows = words * len(_ROW_AT_NIBBLE)
        format = QuantFormat(4, group_of(self.group_size, columns), not self.zero_point)
        groups = format.num_groups(columns)
        expected = {"qweight": [(columns, words)], "qzeros": [(groups, words)], "scales": [(groups, rows)]}
        return format, rows, columns, expected

    def grid(self, format: QuantFormat, rows: int, part: str, shape: tuple[int, ...]) -> PartGrid:
        outputs = Axis(1, 1 if part == "scales" else len(_ROW_AT_NIBBLE))
        if part == "qweight":
            return PartGrid(shape, outputs, Axis(0))
        return PartGrid(shape, outputs, None if format.group_size is None else Axis(0, format.group_size))

    def convert_into(self, target: QuantizedMatrix, parts: Mapping[str, torch.Tensor]) -> None:
        check_dtypes(parts, {"qweight": (torch.int32,), "qzeros": (torch.int32,), "scales": FLOATS})
        fill_zeros(target, _unpack(parts["qzeros"]) if "qzeros" in parts else None, "qzeros")
        fill_scales(target, parts["scales"].t(), "scales")
        for rows in target.slices(SLICE_ELEMENTS, unit=len(_ROW_AT_NIBBLE)):
            words = slice(rows.start // len(_ROW_AT_NIBBLE), rows.stop // len(_ROW_AT_NIBBLE))
            fill_codes(target.part(rows), _unpack(parts["qweight"][:, words]))


def _unpack(words: torch.Tensor) -> torch.Tensor:
    """Return the codes, [8 * words, columns] uint8, of words [columns, words]."""
    octets = bytes_of(words.t())
    codes = torch.empty(8 * words.shape[1], words.shape[0], dtype=torch.uint8, device=words.device)
    for nibble, row in enumerate(_ROW_AT_NIBBLE):
        pairs = octets[:, nibble // 2 :: 4]
        codes[row :: len(_ROW_AT_NIBBLE)] = pairs >> 4 if nibble % 2 else pairs & 15
    return codes
