"""Checkpoints of E2M1 floats in pairs: MXFP4 as gpt-oss is published.

X_blocks: uint8 [..., rows, columns / 32, 16], two codes a byte, that of the even column in the low half;
X_scales: uint8 [..., rows, columns / 32]; a value is code * 2 ** (scale - 127).

``X`` is a parameter of stacked experts, and its rows are output channels, whatever way transformers' module holds them
(integrations/mxfp4.py: `convert_moe_packed_tensors`, which transposes what it dequantizes).
"""

from collections.abc import Collection, Mapping, Sequence
from math import prod
from typing import Any, Final

import torch
from pydantic import ConfigDict

from zinfer.kernels.quantized import QuantFormat
from zinfer.weights.formats.scheme import Layout, PublishedScheme, Shapes, contradiction

MX_COLUMNS: Final = 32
"""Columns that share a scale in the OCP's microscaling formats."""


def e2m1_in_groups(size: int) -> QuantFormat:
    """Return the format of E2M1 codes with a scale for so many columns of a row."""
    return QuantFormat(4, size, is_float=True, in_grid=True)


class Mxfp4(PublishedScheme):
    """Experts of gpt-oss; all else is in full precision."""

    model_config = ConfigDict(extra="forbid")

    marks = ("blocks", "scales")

    quant_method: str
    modules_to_not_convert: Any = None
    dequantize: Any = None

    def stored(self, names: Collection[str]) -> dict[str, dict[str, str]]:
        held = set(names)
        split = (name.rpartition("_") for name in held)
        return {
            name: self.parts_of(name, held, "_")
            for name in sorted({name for name, _, part in split if part in self.marks})
        }

    def part_names(self, module: str) -> tuple[Sequence[str], Sequence[str]]:
        return self.marks, ()

    def places(self, parameter: str, parts: Collection[str]) -> Mapping[str, str]:
        return {"codes": "blocks", "scales": "scales"}

    def dtypes(self, parameter: str) -> Mapping[str, Collection[torch.dtype]]:
        return {"codes": (torch.uint8,), "scales": (torch.uint8, torch.float8_e8m0fnu)}

    def layout(self, parameter: str, shapes: Shapes) -> Layout:
        blocks = shapes["blocks"]
        if len(blocks) < 3 or blocks[-1] != MX_COLUMNS // 2:
            raise contradiction(parameter, "blocks", blocks, f"blocks of {MX_COLUMNS // 2} bytes")
        rows, columns = prod(blocks[:-2]), blocks[-2] * MX_COLUMNS
        return e2m1_in_groups(MX_COLUMNS), rows, columns, {"blocks": [blocks], "scales": [blocks[:-1]]}
