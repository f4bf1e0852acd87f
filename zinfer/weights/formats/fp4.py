"""MXFP4 as gpt-oss is published, and what nvidia-modelopt writes: FP8 and NVFP4.

E2M1 codes lie in pairs. `mxfp4`:

X_blocks: uint8 [..., rows, columns / 32, 16], two codes a byte, that of the even column in the low half;
X_scales: uint8 [..., rows, columns / 32]; a value is code * 2 ** (scale - 127).

``X`` is a parameter of stacked experts, and its rows are output channels, whatever way transformers' module holds them
(integrations/mxfp4.py: `convert_moe_packed_tensors`, which transposes what it dequantizes).

`modelopt` (modelopt/torch/export/quant_utils.py: `to_quantized_weight`), whose section may also be in
hf_quant_config.json; the tensors tell which of the two a module is:

weight: uint8 [rows, columns / 2]; weight_scale: e4m3 [rows, columns / 16]; weight_scale_2: float32 [];
    a value is code * weight_scale * weight_scale_2;
weight: float8_e4m3fn [rows, columns]; weight_scale: one, a row's, a block's of 128 x 128, or bytes of powers of two for
    32 columns.

Static scales of activations and of the KV cache are not read.
"""

from collections.abc import Collection, Mapping, Sequence
from math import prod
from typing import Any, Final, Literal

import torch
from pydantic import ConfigDict

from zinfer.config.quantization_rules import Quantization
from zinfer.weights.formats.scheme import (
    FLOATS,
    MX_COLUMNS,
    WIDE,
    Layout,
    PublishedScheme,
    Shapes,
    contradiction,
    e2m1_in_groups,
    e4m3_in_blocks,
    matrix_shape,
    planned_as,
)

_NV_COLUMNS: Final = 16
_BLOCK: Final = 128


class Mxfp4(PublishedScheme):
    """Experts of gpt-oss; all else is in full precision."""

    model_config = ConfigDict(extra="forbid")

    marks = ("blocks", "scales")

    quant_method: str
    modules_to_not_convert: Any = None
    dequantize: Any = None

    @property
    def planned(self) -> Quantization:
        rule = planned_as(e2m1_in_groups(MX_COLUMNS), "float8_e8m0fnu")
        return Quantization((rule,), include=("experts",))

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

    def dtypes(self, parameter: str, parts: Collection[str]) -> Mapping[str, Collection[torch.dtype]]:
        return {"codes": (torch.uint8,), "scales": (torch.uint8, torch.float8_e8m0fnu)}

    def layout(self, parameter: str, shapes: Shapes) -> Layout:
        blocks = shapes["blocks"]
        if len(blocks) < 3 or blocks[-1] != MX_COLUMNS // 2:
            raise contradiction(parameter, "blocks", blocks, f"blocks of {MX_COLUMNS // 2} bytes")
        rows, columns = prod(blocks[:-2]), blocks[-2] * MX_COLUMNS
        return e2m1_in_groups(MX_COLUMNS), rows, columns, {"blocks": [blocks], "scales": [blocks[:-1]]}


class ModelOpt(PublishedScheme):
    """Weights that nvidia-modelopt exported; modules without scales are in full precision."""

    marks = ("weight_scale",)
    set_aside_parts = ("input_scale", "k_scale", "v_scale", "k_bmm_scale", "v_bmm_scale")

    quant_algo: Literal[
        "fp8", "fp8_per_channel_per_token", "fp8_pb_wo", "mxfp8", "nvfp4", "w4a16_nvfp4", "mixed_precision"
    ]

    @property
    def planned(self) -> Quantization | None:
        if self.quant_algo.endswith("nvfp4"):
            return Quantization((planned_as(e2m1_in_groups(_NV_COLUMNS, "times"), "float8_e4m3fn"),))
        blocks = {"fp8": (None, None), "fp8_per_channel_per_token": (1, None), "fp8_pb_wo": (_BLOCK, _BLOCK)}
        block = blocks.get(self.quant_algo)
        return None if block is None else Quantization((planned_as(e4m3_in_blocks(WIDE, WIDE, block), "float32"),))

    def part_names(self, module: str) -> tuple[Sequence[str], Sequence[str]]:
        return ("weight", "weight_scale"), ("weight_scale_2",)

    def places(self, parameter: str, parts: Collection[str]) -> Mapping[str, str]:
        outer = {"outer_scales": "weight_scale_2"} if "weight_scale_2" in parts else {}
        return {"codes": "weight", "scales": "weight_scale", **outer}

    def dtypes(self, parameter: str, parts: Collection[str]) -> Mapping[str, Collection[torch.dtype]]:
        if "weight_scale_2" in parts:
            one = (torch.float32,)
            return {"codes": (torch.uint8,), "scales": (torch.float8_e4m3fn,), "outer_scales": one}
        return {"codes": (torch.float8_e4m3fn,), "scales": (*FLOATS, torch.uint8, torch.float8_e8m0fnu)}

    def layout(self, parameter: str, shapes: Shapes) -> Layout:
        rows, stored = matrix_shape(parameter, "weight", shapes)
        if "weight_scale_2" in shapes:
            columns = 2 * stored
            groups: dict[str, list[tuple[int, ...]]] = {
                "weight": [(rows, stored)],
                "weight_scale": [(rows, -(-columns // _NV_COLUMNS))],
                "weight_scale_2": [(), (1,)],
            }
            return e2m1_in_groups(_NV_COLUMNS, "times"), rows, columns, groups
        blocks = -(-rows // _BLOCK), -(-stored // _BLOCK)
        ways: list[tuple[tuple[int | None, int | None], list[tuple[int, ...]]]] = [
            ((None, None), [(), (1,), (1, 1)]),
            ((1, None), [(rows,), (rows, 1)]),
            ((_BLOCK, _BLOCK), [blocks, (blocks[0], 1, blocks[1], 1)]),
            ((1, MX_COLUMNS), [(rows, -(-stored // MX_COLUMNS))]),
        ]
        block = next((block for block, known in ways if shapes["weight_scale"] in known), (None, None))
        weight: list[tuple[int, ...]] = [(rows, stored)]
        expected = {"weight": weight, "weight_scale": [shape for _, known in ways for shape in known]}
        return e4m3_in_blocks(rows, stored, block), rows, stored, expected
