"""GPTQ checkpoints with 4 or 8 bits, as AutoGPTQ and GPTQModel write them, and what auto-round packs as GPTQ or AWQ.

For a linear layer of ``rows`` outputs and ``columns`` inputs, with 32 / bits codes a word
(GPTQModel 7.7, nn_modules/qlinear/__init__.py: `pack_original`, `dequantize_weight`):

qweight: int32 [columns / codes a word, rows]; a word holds the codes of successive columns of one row;
qzeros:  int32 [groups, rows / codes a word]; a word holds the zeros of successive rows of one group;
scales:  [groups, rows]; a value is (code - zero) * scale;
g_idx:   int32 [columns], the group of each column.

The format ``gptq`` subtracts 1 from every zero, ``gptq_v2`` does not. It subtracts from whole words (utils/model.py:
`convert_gptq_v2_to_v1_format_module`), so a zero of 0 borrows from its neighbour; adding to whole words undoes that.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import torch
from pydantic import AfterValidator, Field, ValidationInfo, field_validator

from zinfer.config.quantization_rules import Quantization, QuantRule
from zinfer.kernels.quantized import QuantFormat, QuantizedMatrix
from zinfer.weights.formats.awq import Awq
from zinfer.weights.formats.packing import fill_order, fill_scales, fill_words, fill_zeros, unpack
from zinfer.weights.formats.scheme import (
    FLOATS,
    INTEGERS,
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
    unsupported,
)

_REQUIRED: Final = ("qweight", "qzeros", "scales")
_ONE_IN_EACH: Final = {4: 0x11111111, 8: 0x01010101}
_FULL_BITS: Final = 16
_OVERRIDES: Final = frozenset({"bits", "group_size", "sym", "desc_act", "format", "checkpoint_format", "pack_dtype"})


class Gptq(ForeignScheme, Encoding):
    """Weights that GPTQ's tools wrote.

    Attributes:
        desc_act: columns were quantized in the order of activations, so the columns of a group may be scattered; each
            product then reorders its input first.
        dynamic: rules for single modules, which may exempt them, but not store them in another way.
    """

    marks = (*_REQUIRED, "g_idx")

    bits: Literal[4, 8]
    group_size: GroupSize = 128
    sym: bool = True
    desc_act: bool = False
    format: Literal["gptq", "gptq_v2"] = "gptq"
    checkpoint_format: Literal["gptq", "gptq_v2"] | None = None
    is_marlin_format: Literal[False] = False
    pack_dtype: Literal["int32"] = "int32"
    dynamic: dict[str, dict[str, Any]] = Field(default_factory=dict)

    @field_validator("dynamic")
    @classmethod
    def _refuse_overrides(cls, rules: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        for pattern, rule in rules.items():
            if _OVERRIDES & rule.keys():
                raise unsupported(f"{pattern}: modules that are stored otherwise than the rest are not read")
        return rules

    @property
    def planned(self) -> Quantization:
        return Quantization((QuantRule(bits=self.bits, group_size=self.group_size, symmetric=self.sym),))

    def part_names(self, module: str) -> tuple[Sequence[str], Sequence[str]]:
        return (self.marks if self.desc_act and self.group_size else _REQUIRED), ("g_idx",)

    def layout(self, parameter: str, shapes: Shapes) -> Layout:
        words, rows = matrix_shape(parameter, "qweight", shapes)
        codes = 32 // self.bits
        columns = shapes["g_idx"][0] if shapes.get("g_idx") else words * codes
        size = group_of(self.group_size, columns)
        format = QuantFormat(self.bits, size, self.sym, orders_columns=self.desc_act and size is not None)
        groups = format.num_groups(columns)
        expected: dict[str, list[tuple[int, ...]]] = {
            "qweight": [(-(-columns // codes), rows)],
            "qzeros": [(groups, -(-rows // codes))],
            "scales": [(groups, rows)],
            "g_idx": [(columns,)],
        }
        return format, rows, columns, expected

    def grid(self, format: QuantFormat, rows: int, part: str, shape: tuple[int, ...]) -> PartGrid:
        codes, groups = 32 // self.bits, None if format.group_size is None else Axis(0, format.group_size)
        if part == "g_idx":
            return PartGrid(shape, columns=Axis(0))
        if part == "qweight":
            return PartGrid(shape, Axis(1), Axis(0, codes))
        return PartGrid(shape, Axis(1, codes if part == "qzeros" else 1), groups)

    def of_cut(
        self, parts: Mapping[str, torch.Tensor], rows: int, columns: int, own: torch.Tensor
    ) -> Mapping[str, torch.Tensor]:
        size = group_of(self.group_size, columns)
        if "g_idx" not in parts or size is None or len(own) == columns:
            return parts
        left_out = own // size - torch.arange(len(own), device=own.device) // size
        return {**parts, "g_idx": parts["g_idx"] - left_out.to(parts["g_idx"].device)}

    def convert_into(self, target: QuantizedMatrix, parts: Mapping[str, torch.Tensor]) -> None:
        words = (torch.int32,)
        check_dtypes(parts, {"qweight": words, "qzeros": words, "scales": FLOATS, "g_idx": INTEGERS})
        if "g_idx" in parts:
            fill_order(target, parts["g_idx"], "g_idx")
        is_less_one = (self.checkpoint_format or self.format) == "gptq"
        zeros = parts["qzeros"] + _ONE_IN_EACH[self.bits] if is_less_one else parts["qzeros"]
        fill_zeros(target, unpack(zeros, self.bits, target.rows).t(), "qzeros")
        fill_scales(target, parts["scales"].t(), "scales")
        fill_words(target, parts["qweight"].t())


def _refuse_other_bits(extra: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
    """Refuse auto-round's single layers that are quantized otherwise than the rest; those left in full say 16 bits."""
    stated = {key: info.data.get(key) for key in ("bits", "group_size", "sym")}
    for layer, own in extra.items():
        is_full = isinstance(own, dict) and own.get("bits", 0) >= _FULL_BITS
        if not is_full and isinstance(own, dict) and any(own.get(key, value) != value for key, value in stated.items()):
            raise unsupported(f"{layer}: modules that are stored otherwise than the rest are not read")
    return extra


class AutoRoundGptq(Gptq):
    """Weights that Intel's auto-round wrote in GPTQ's packing; columns keep their order."""

    packing_format: Literal["auto_round:auto_gptq", "auto_round:gptq"]
    data_type: Literal["int"] = "int"
    extra_config: Annotated[dict[str, Any], AfterValidator(_refuse_other_bits)] = Field(default_factory=dict)


class AutoRoundAwq(Awq):
    """Weights that Intel's auto-round wrote in AWQ's packing, always with zeros."""

    packing_format: Literal["auto_round:auto_awq", "auto_round:awq"]
    data_type: Literal["int"] = "int"
    sym: bool = True
    zero_point: Literal[True] = True
    extra_config: Annotated[dict[str, Any], AfterValidator(_refuse_other_bits)] = Field(default_factory=dict)
