"""GPTQ checkpoints with 4 or 8 bits, as AutoGPTQ and GPTQModel write them.

For a linear layer of ``rows`` outputs and ``columns`` inputs, with 32 / bits codes a word
(GPTQModel 7.7, nn_modules/qlinear/__init__.py: `pack_original`, `dequantize_weight`):

qweight: int32 [columns / codes a word, rows], the codes of a word being successive columns of one row;
qzeros:  int32 [groups, rows / codes a word], the codes of a word being successive rows of one group;
scales:  [groups, rows]; a value is (code - zero) * scale;
g_idx:   int32 [columns], the group of each column.

The format ``gptq`` subtracts 1 from every zero, ``gptq_v2`` does not. It subtracts from whole words (utils/model.py:
`convert_gptq_v2_to_v1_format_module`), so a zero of 0 borrows from its neighbour; adding to whole words undoes that.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final, Literal

import torch

from zinfer.kernels.quantized import QuantFormat, QuantizedMatrix
from zinfer.quantization.foreign.contract import Scheme
from zinfer.quantization.foreign.filling import fill_order, fill_scales, fill_words, fill_zeros, unpack
from zinfer.quantization.foreign.parts import (
    Section,
    Shapes,
    check_dtypes,
    check_format,
    check_shapes,
    marked_modules,
    matrix_shape,
    parts_of,
)

FLOATS: Final = (torch.float16, torch.bfloat16, torch.float32)
INTEGERS: Final = (torch.int32, torch.int64)
_REQUIRED: Final = ("qweight", "qzeros", "scales")
_ONE_IN_EACH: Final = {4: 0x11111111, 8: 0x01010101}
_OVERRIDES: Final = frozenset({"bits", "group_size", "sym", "desc_act", "format", "checkpoint_format", "pack_dtype"})


@dataclass(frozen=True)
class Gptq(Scheme):
    """Weights that GPTQ's tools wrote.

    Args:
        bits: of a code.
        group_size: columns that share a scale; None: a whole row.
        symmetric: every zero is the middle code.
        ordered: columns were quantized in the order of activations, so that groups may lie anywhere among them;
            each product then puts what it multiplies with in their order first.
        zeros_less_one: the format ``gptq``.
    """

    bits: Literal[4, 8]
    group_size: int | None
    symmetric: bool
    ordered: bool
    zeros_less_one: bool

    @classmethod
    def from_config(cls, config: Section) -> "Gptq":
        """The scheme of a ``quantization_config`` whose method is gptq.

        Raises:
            CheckpointError: bits, a format or rules that are not supported; names the key.
        """
        bits = config.integer("bits")
        if bits not in _ONE_IN_EACH:
            raise config.unsupported("bits", "GPTQ weights are read with 4 or 8 bits")
        format_key = "checkpoint_format" if config.members.get("checkpoint_format") is not None else "format"
        format = config.text(format_key, "gptq")
        if format not in ("gptq", "gptq_v2"):
            raise config.unsupported(format_key, "GPTQ weights are read in the formats gptq and gptq_v2")
        if config.flag("is_marlin_format", False):
            raise config.unsupported("is_marlin_format", "weights laid out for Marlin kernels are not read")
        if config.text("pack_dtype", "int32") != "int32":
            raise config.unsupported("pack_dtype", "codes are read from words of 32 bits")
        _refuse_overrides(config)
        return cls(
            bits=4 if bits == 4 else 8,
            group_size=group_size_of(config),
            symmetric=config.flag("sym", True),
            ordered=config.flag("desc_act", False),
            zeros_less_one=format == "gptq",
        )

    def stored(self, names: Collection[str]) -> dict[str, dict[str, str]]:
        names = set(names)
        required = (*_REQUIRED, "g_idx") if self.ordered and self.group_size else _REQUIRED
        modules = marked_modules(names, (*_REQUIRED, "g_idx"))
        return {f"{module}.weight": parts_of(module, names, required, ("g_idx",)) for module in modules}

    def format_of(self, parameter: str, shapes: Shapes) -> tuple[QuantFormat, int, int]:
        words, rows = matrix_shape(parameter, "qweight", shapes)
        codes = 32 // self.bits
        columns = shapes["g_idx"][0] if shapes.get("g_idx") else words * codes
        size = self.group_size if self.group_size and self.group_size < columns else None
        format = QuantFormat(self.bits, size, self.symmetric, orders_columns=self.ordered and size is not None)
        check_format(parameter, format, rows, columns)
        groups = format.num_groups(columns)
        expected: dict[str, list[tuple[int, ...]]] = {
            "qweight": [(-(-columns // codes), rows)],
            "qzeros": [(groups, -(-rows // codes))],
            "scales": [(groups, rows)],
            "g_idx": [(columns,)],
        }
        check_shapes(parameter, shapes, expected)
        return format, rows, columns

    def convert_into(self, target: QuantizedMatrix, parts: Mapping[str, torch.Tensor]) -> None:
        words = (torch.int32,)
        check_dtypes(parts, {"qweight": words, "qzeros": words, "scales": FLOATS, "g_idx": INTEGERS})
        if "g_idx" in parts:
            fill_order(target, parts["g_idx"], "g_idx")
        zeros = parts["qzeros"] + _ONE_IN_EACH[self.bits] if self.zeros_less_one else parts["qzeros"]
        fill_zeros(target, unpack(zeros, self.bits, target.rows).t(), "qzeros")
        fill_scales(target, parts["scales"].t(), "scales")
        fill_words(target, parts["qweight"].t())


def group_size_of(config: Section) -> int | None:
    """Columns that share a scale, None for whole rows, which GPTQ and AWQ write as -1."""
    size = config.integer("group_size", 128)
    if size == -1:
        return None
    if size < 1:
        raise config.unusable("group_size", "neither -1 nor a number of columns; restore config.json")
    return size


def _refuse_overrides(config: Section) -> None:
    """Rules for single modules may leave them alone, but not store them otherwise."""
    rules = config.section("dynamic")
    for pattern in rules.members if rules else ():
        assert rules is not None
        rule = rules.section(pattern)
        if rule and _OVERRIDES & rule.members.keys():
            raise rules.unsupported(pattern, "modules that are stored otherwise than the rest are not read")
