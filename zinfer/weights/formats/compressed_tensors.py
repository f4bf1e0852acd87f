"""compressed-tensors checkpoints: 4- and 8-bit integers, packed into words or one per byte; e4m3 and e2m1 floats.

The fields are those of compressed-tensors 0.20 (quantization/quant_scheme.py: `QuantizationScheme`, quant_args.py:
`QuantizationArgs`). A group of the config says how the weights of some modules are stored.

For a linear layer of ``rows`` outputs and ``columns`` inputs (compressors/pack_quantized and
compressors/naive_quantized):

weight_packed: int32 [rows, columns / codes a word], codes plus 8 or 128; a word holds successive columns;
weight_shape:  integers [2], rows and columns; or, if codes are not packed,
weight:        int8 or float8_e4m3fn [rows, columns];
weight_scale:  one, [rows, 1], [rows, groups] or [blocks of rows, blocks of columns]; a value is (code - zero) * scale;
weight_zero_point: shaped like weight_scale, int8; with packed weights and more than one scale packed along the rows,
    also plus 8 or 128, int32 [rows / codes a word, groups] (int8, not packed, before version 0.9);
weight_g_idx:  int32 [columns], the group of each column, for weights in activation order.

Floats lie in slabs as they are stored (compressors/mxfp4, mxfp8 and nvfp4). E4M3: weight and weight_scale, in which the
last blocks may be cut, or bytes of powers of two for 32 columns (mxfp8). E2M1: weight_packed uint8 [rows, columns / 2]
and weight_scale [rows, columns / group size]: bytes of powers of two (mxfp4), or e4m3, which is divided by
weight_global_scale (nvfp4).

Activations and the KV cache stay in full precision, and their static scales are not read. Other changes of the
computation (transforms) and sparse layouts are refused.
"""

import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Final, Literal

import torch
from pydantic import Field, PositiveInt, ValidationInfo, field_validator, model_validator

from zinfer.config.quantization_rules import Quantization, QuantRule
from zinfer.errors import CheckpointError
from zinfer.kernels.quantized import QuantFormat, QuantizedMatrix
from zinfer.weights.formats.packing import fill_codes, fill_order, fill_scales, fill_words, fill_zeros, unpack
from zinfer.weights.formats.scheme import (
    FLOATS,
    INTEGERS,
    MX_COLUMNS,
    PATH,
    REMEDY,
    WIDE,
    Axis,
    EncodedMatrix,
    Encoding,
    Entry,
    ForeignScheme,
    Layout,
    Nothing,
    PartGrid,
    Section,
    Shapes,
    check_dtypes,
    e2m1_in_groups,
    e4m3_in_blocks,
    malformed,
    matrix_shape,
    planned_as,
    unsupported,
)

ANY_MODULE: Final = "Linear"
_REGEX: Final = "re:"
_TYPES: Final = {
    "pack-quantized": ("int",),
    "int-quantized": ("int",),
    "float-quantized": ("float",),
    "naive-quantized": ("int", "float"),
    "mxfp8-quantized": ("float",),
    "mxfp4-pack-quantized": ("float",),
    "nvfp4-pack-quantized": ("float",),
}
_COLUMNS_OF_SCALE: Final = {
    "mxfp8-quantized": MX_COLUMNS,
    "mxfp4-pack-quantized": MX_COLUMNS,
    "nvfp4-pack-quantized": 16,
}
_REORDERED: Final = ("group", "dynamic", "true")


class _Weights(Section):
    """How codes and scales are stored; ``strategy`` is the unit of a scale, by default after ``group_size``."""

    type: Literal["int", "float"] = "int"
    num_bits: Literal[4, 8] = 8
    symmetric: bool = True
    group_size: int | None = None
    block_structure: Annotated[list[PositiveInt], Field(min_length=2, max_length=2)] | None = None
    strategy: Literal["tensor", "channel", "group", "tensor_group", "block"] | None = None
    actorder: Any = None

    @field_validator("symmetric")
    @classmethod
    def _check_floats(cls, value: bool, info: ValidationInfo) -> bool:
        if info.data.get("type") == "float" and not value:
            raise unsupported("floating-point weights are read without zero points")
        return value

    @field_validator("strategy")
    @classmethod
    def _check_extent(cls, strategy: str | None, info: ValidationInfo) -> str:
        size = info.data.get("group_size")
        strategy = strategy or {None: "tensor", -1: "channel"}.get(size, "group")
        if strategy in ("group", "tensor_group") and (size is None or size < 1):
            raise malformed(f"group_size is {size}, not a number of columns")
        if strategy == "block" and info.data.get("block_structure") is None:
            raise malformed("block_structure does not give the rows and columns of a block")
        return strategy


class _Activations(Section):
    dynamic: Literal[True, False, "local"] = False


class WeightGroup(Section):
    """Weights stored alike: a member of ``config_groups``.

    Attributes:
        targets: names of modules, patterns of them ("re:..."), or names of classes.
        layout: ``format`` in the configuration.
    """

    targets: list[str]
    layout: Literal[
        "pack-quantized",
        "int-quantized",
        "float-quantized",
        "naive-quantized",
        "mxfp8-quantized",
        "mxfp4-pack-quantized",
        "nvfp4-pack-quantized",
    ] = Field(alias="format")
    weights: _Weights
    input_activations: _Activations | None = None
    output_activations: Nothing = None

    @field_validator("targets")
    @classmethod
    def _check_patterns(cls, targets: list[str]) -> list[str]:
        for target in targets:
            try:
                re.compile(target.removeprefix(_REGEX) if target.startswith(_REGEX) else "")
            except re.error as error:
                raise malformed(f"{target!r} is no pattern ({error})") from error
        return targets

    @field_validator("weights")
    @classmethod
    def _check_layout(cls, weights: _Weights, info: ValidationInfo) -> _Weights:
        layout = info.data.get("layout")
        if layout in _TYPES and weights.type not in _TYPES[layout]:
            raise unsupported(f"weights in the format {layout} are of type {_TYPES[layout][0]}")
        if layout == "pack-quantized" and weights.strategy == "block":
            raise unsupported("packed weights are read with a scale per tensor, channel or group")
        if weights.type == "float" and weights.num_bits != (4 if str(layout).endswith("p4-pack-quantized") else 8):
            raise unsupported(
                f"floating-point weights of {weights.num_bits} bits are not stored in the format {layout}"
            )
        if weights.strategy == "tensor_group" and layout != "nvfp4-pack-quantized":
            raise unsupported("a scale of scales is read in the format nvfp4-pack-quantized alone")
        if layout in _COLUMNS_OF_SCALE and weights.group_size != _COLUMNS_OF_SCALE[layout]:
            raise unsupported(f"a scale in the format {layout} is of {_COLUMNS_OF_SCALE[layout]} columns")
        return weights

    @property
    def format(self) -> QuantFormat:
        """The format of weights that are integers; its groups are the rows and columns of a scale."""
        rows, columns = self.block
        return QuantFormat(self.weights.num_bits, columns, self.weights.symmetric, group_rows=rows)

    @property
    def block(self) -> tuple[int | None, int | None]:
        """Rows and columns that share a scale; None: all of them."""
        weights = self.weights
        if weights.strategy == "block":
            assert weights.block_structure is not None
            return weights.block_structure[0], weights.block_structure[1]
        return None if weights.strategy == "tensor" else 1, weights.group_size if "group" in str(
            weights.strategy
        ) else None

    @property
    def is_float(self) -> bool:
        """Whether slabs hold the weights as they are stored."""
        return self.weights.type == "float"

    @property
    def packed(self) -> bool:
        """Whether codes are packed into words; otherwise there is one element per code."""
        return self.layout == "pack-quantized"

    @property
    def reordered(self) -> bool:
        """Whether columns are in activation order, with a group index for each."""
        return str(self.weights.actorder).lower() in _REORDERED

    @property
    def required(self) -> tuple[str, ...]:
        """The parts that each module of the group must have."""
        if self.is_float:
            packed = "weight_packed" if self.weights.num_bits == 4 else "weight"
            return packed, "weight_scale", *(("weight_global_scale",) if self.layout == "nvfp4-pack-quantized" else ())
        weight = ("weight_packed", "weight_shape") if self.packed else ("weight",)
        zeros = () if self.format.symmetric else ("weight_zero_point",)
        return (*weight, "weight_scale", *zeros, *(("weight_g_idx",) if self.reordered else ()))

    def fits(self, module: str) -> bool:
        """Return whether a target's pattern matches the start of the module's name."""
        patterns = (target.removeprefix(_REGEX) for target in self.targets if target.startswith(_REGEX))
        return any(re.match(pattern, module) for pattern in patterns)


log = logging.getLogger(__name__)


class _Sparsity(Section):
    format: Literal["dense"] = "dense"


class CompressedTensors(ForeignScheme, Encoding):
    """Weights that compressed-tensors wrote, in one or more groups of modules."""

    marks = ("weight_packed", "weight_scale")
    set_aside_parts = (
        "input_scale",
        "input_global_scale",
        "input_zero_point",
        "q_scale",
        "k_scale",
        "v_scale",
        "k_zero_point",
        "v_zero_point",
    )

    transform_config: Nothing = None
    moe_sparsity_config: Nothing = None
    sparsity_config: _Sparsity | None = None
    quantization_status: Literal["compressed"] = "compressed"
    config_groups: dict[str, WeightGroup] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _with_formats(cls, members: dict[str, Any]) -> dict[str, Any]:
        """Give each group without a format the format of the whole section."""
        groups, default = members.get("config_groups"), members.get("format")
        if not isinstance(groups, dict) or default is None:
            return members
        stated = {
            name: {**group, "format": group.get("format") or default} if isinstance(group, dict) else group
            for name, group in groups.items()
        }
        return {**members, "config_groups": stated}

    @field_validator("config_groups")
    @classmethod
    def _check_groups(cls, groups: dict[str, WeightGroup]) -> dict[str, WeightGroup]:
        if not groups:
            raise unsupported("no group says how weights are stored")
        for name, group in groups.items():
            if group.input_activations is not None:
                log.warning(
                    "%s asks for quantized activations; they stay in full precision, only weights are quantized: "
                    "leave the key out of config.json to silence this",
                    f"{PATH}.config_groups.{name}.input_activations",
                )
        return groups

    @property
    def planned(self) -> Quantization | None:
        if len(self.config_groups) > 1:
            return None
        (group,) = self.config_groups.values()
        bits, size = group.weights.num_bits, group.block[1]
        if not group.is_float:
            return Quantization((QuantRule(bits=bits, group_size=size, symmetric=group.weights.symmetric),))
        is_nvfp4 = group.layout == "nvfp4-pack-quantized"
        scale_dtype = "float8_e4m3fn" if is_nvfp4 else "float8_e8m0fnu"
        if bits == 4 and size is not None:
            return Quantization((planned_as(e2m1_in_groups(size, "over" if is_nvfp4 else None), scale_dtype),))
        scale_dtype = scale_dtype if group.layout in _COLUMNS_OF_SCALE else "float32"
        return Quantization((planned_as(e4m3_in_blocks(WIDE, WIDE, group.block), scale_dtype),))

    def part_names(self, module: str) -> tuple[Sequence[str], Sequence[str]]:
        return self._group(module).required, ()

    def matrix(self, parameter: str, parts: Mapping[str, Entry]) -> EncodedMatrix[Entry]:
        group = self._group(parameter.removesuffix(".weight"))
        if not group.is_float:
            return super().matrix(parameter, parts)
        codes, *scales = group.required
        names = dict(zip(("codes", "scales", "outer_scales"), (codes, *scales), strict=False))
        of_scales: Collection[torch.dtype] = FLOATS
        if group.layout in _COLUMNS_OF_SCALE:
            of_scales = (torch.float8_e4m3fn,) if len(scales) == 2 else (torch.uint8, torch.float8_e8m0fnu)
        of_codes = torch.uint8 if group.weights.num_bits == 4 else torch.float8_e4m3fn
        dtypes = {"codes": (of_codes,), "scales": of_scales, "outer_scales": (torch.float32,)}
        return self.in_place(parameter, parts, names, dtypes)

    def layout(self, parameter: str, shapes: Shapes) -> Layout:
        group = self._group(parameter.removesuffix(".weight"))
        if group.is_float:
            return _layout_of_floats(parameter, shapes, group)
        format = group.format
        if group.reordered and format.group_size is not None:
            format = replace(format, orders_columns=True)
        rows, columns = _extent(parameter, shapes, group)
        grid = _grid(format, rows, columns)
        scales: list[tuple[int, ...]] = [grid, (1,), ()] if grid == (1, 1) and format.group_rows is None else [grid]
        codes = 32 // format.bits
        packed_zeros: list[tuple[int, ...]] = (
            [(-(-rows // codes), grid[1])] if group.packed and format.group_rows else []
        )
        expected: dict[str, list[tuple[int, ...]]] = {
            "weight_packed": [(rows, -(-columns // codes))],
            "weight_shape": [(2,)],
            "weight": [(rows, columns)],
            "weight_scale": scales,
            "weight_zero_point": [*packed_zeros, *scales],
            "weight_g_idx": [(columns,)],
        }
        return format, rows, columns, expected

    def grid(self, format: QuantFormat, rows: int, part: str, shape: tuple[int, ...]) -> PartGrid:
        codes, groups = 32 // format.bits, None if format.group_size is None else Axis(1, format.group_size)
        if part == "weight_shape":
            return PartGrid(shape)
        if part == "weight_g_idx":
            return PartGrid(shape, columns=Axis(0))
        if part in ("weight", "weight_packed"):
            return PartGrid(shape, Axis(0), Axis(1, codes if part == "weight_packed" else 1))
        if len(shape) < 2 or (format.group_rows is None and shape[0] == 1):
            return PartGrid(shape)
        is_packed = part == "weight_zero_point" and shape[0] * (format.group_rows or 1) < rows
        return PartGrid(shape, Axis(0, codes if is_packed else format.group_rows or 1), groups)

    def of_cut(
        self, parts: Mapping[str, torch.Tensor], rows: int, columns: int, own: torch.Tensor
    ) -> Mapping[str, torch.Tensor]:
        _check_extent(parts, rows, columns)
        return {name: part for name, part in parts.items() if name != "weight_shape"}

    def convert_into(self, target: QuantizedMatrix, parts: Mapping[str, torch.Tensor]) -> None:
        _check_parts(target, parts)
        fill_zeros(target, _zeros(target, parts), "weight_zero_point")
        fill_scales(target, _per_row(parts["weight_scale"], target), "weight_scale")
        if "weight_packed" in parts:
            fill_words(target, parts["weight_packed"])
        else:
            fill_codes(target, _unsigned(parts["weight"], target.format.bits, "weight"))

    def _group(self, module: str) -> WeightGroup:
        """Return the module's group: names take precedence over patterns, patterns over classes (all are linear)."""
        groups = list(self.config_groups.values())
        if len(groups) == 1:
            return groups[0]
        tests: tuple[Callable[[WeightGroup], bool], ...] = (
            lambda group: module in group.targets,
            lambda group: group.fits(module),
            lambda group: ANY_MODULE in group.targets,
        )
        found = next((group for test in tests for group in groups if test(group)), None)
        if found is None:
            raise CheckpointError(
                f"{module} is quantized, but no group in quantization_config.config_groups of config.json has it among "
                f"its targets: restore config.json"
            )
        return found


def _layout_of_floats(parameter: str, shapes: Shapes, group: WeightGroup) -> Layout:
    codes = group.required[0]
    rows, stored = matrix_shape(parameter, codes, shapes)
    columns, (block_rows, size) = stored if group.weights.num_bits == 8 else 2 * stored, group.block
    grid = 1 if block_rows is None else -(-rows // block_rows), 1 if size is None else -(-columns // size)
    expected: dict[str, list[tuple[int, ...]]] = {
        codes: [(rows, stored)],
        "weight_scale": [grid, *([(1,), ()] if grid == (1, 1) else []), *([(rows,)] if grid == (rows, 1) else [])],
        "weight_global_scale": [(1,), (), (1, 1)],
    }
    if group.weights.num_bits == 8:
        return e4m3_in_blocks(rows, columns, group.block), rows, columns, expected
    assert size is not None, "the layouts of e2m1 have groups"
    outer: Literal["over"] | None = "over" if group.layout == "nvfp4-pack-quantized" else None
    return e2m1_in_groups(size, outer), rows, columns, expected


def _extent(parameter: str, shapes: Shapes, group: WeightGroup) -> tuple[int, int]:
    """Return rows and columns; for packed rows with one scale each, all columns that fit their words."""
    if not group.packed:
        return matrix_shape(parameter, "weight", shapes)
    rows, words = matrix_shape(parameter, "weight_packed", shapes)
    if group.format.group_size is None:
        return rows, words * 32 // group.format.bits
    return rows, matrix_shape(parameter, "weight_scale", shapes)[1] * group.format.group_size


def _grid(format: QuantFormat, rows: int, columns: int) -> tuple[int, int]:
    """Return the shape of the scales as stored."""
    return (1 if format.group_rows is None else rows // format.group_rows, format.num_groups(columns))


def _check_parts(target: QuantizedMatrix, parts: Mapping[str, torch.Tensor]) -> None:
    dtypes = {
        "weight_packed": (torch.int32,),
        "weight_shape": INTEGERS,
        "weight": (torch.int8,),
        "weight_scale": FLOATS,
        "weight_zero_point": (torch.int32, torch.int8) if "weight_packed" in parts else (torch.int8,),
        "weight_g_idx": INTEGERS,
    }
    check_dtypes(parts, dtypes)
    _check_extent(parts, target.rows, target.columns)
    if "weight_g_idx" in parts:
        fill_order(target, parts["weight_g_idx"], "weight_g_idx")


def _check_extent(parts: Mapping[str, torch.Tensor], rows: int, columns: int) -> None:
    if "weight_shape" in parts and parts["weight_shape"].tolist() != [rows, columns]:
        raise CheckpointError(
            f"weight_shape is {parts['weight_shape'].tolist()}, but the packed weight has room for "
            f"[{rows}, {columns}]: rows of one scale are read if they fill their words; {REMEDY}"
        )


def _zeros(target: QuantizedMatrix, parts: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    if "weight_zero_point" not in parts:
        return None
    zeros = parts["weight_zero_point"]
    if zeros.dtype == torch.int32:
        return unpack(zeros.t(), target.format.bits, target.rows).t()
    return _per_row(_unsigned(zeros, target.format.bits, "weight_zero_point"), target)


def _per_row(values: torch.Tensor, target: QuantizedMatrix) -> torch.Tensor:
    """Expand stored scales or zeros to one per row; [1, 1] applies to all rows."""
    values = values.reshape(_grid(target.format, target.rows, target.columns))
    group_rows = target.format.group_rows or 1
    return values if group_rows == 1 else values.repeat_interleave(group_rows, dim=0)


def _unsigned(codes: torch.Tensor, bits: int, part: str) -> torch.Tensor:
    """Shift signed codes (int8) to unsigned ones (uint8)."""
    middle = 1 << (bits - 1)
    if bits == 8:
        return codes.view(torch.uint8) ^ 0x80
    low, high = codes.aminmax()
    if int(low) < -middle or int(high) >= middle:
        raise CheckpointError(
            f"{part} holds codes from {int(low)} to {int(high)}, but quantization_config of config.json says "
            f"{bits} bits: correct num_bits"
        )
    return (codes + middle).to(torch.uint8)
