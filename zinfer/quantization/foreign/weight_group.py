"""A group of a compressed-tensors config: how the weights of some modules are stored.

The fields are those of compressed-tensors 0.20 (quantization/quant_scheme.py: `QuantizationScheme`, quant_args.py:
`QuantizationArgs`).
"""

import re
from typing import Annotated, Any, Final, Literal

from pydantic import Field, PositiveInt, ValidationInfo, field_validator

from zinfer.kernels.quantized import QuantFormat
from zinfer.quantization.foreign.section import Nothing, Section, malformed, unsupported

ANY_MODULE: Final = "Linear"
_REGEX: Final = "re:"
_TYPES: Final = {
    "pack-quantized": ("int",),
    "int-quantized": ("int",),
    "float-quantized": ("float",),
    "naive-quantized": ("int", "float"),
}
_REORDERED: Final = ("group", "dynamic", "true")


class _Weights(Section):
    """How codes and scales are stored; ``strategy`` is the unit of a scale, by default after ``group_size``."""

    type: Literal["int", "float"] = "int"
    num_bits: Literal[4, 8] = 8
    symmetric: bool = True
    group_size: int | None = None
    block_structure: Annotated[list[PositiveInt], Field(min_length=2, max_length=2)] | None = None
    strategy: Literal["tensor", "channel", "group", "block"] | None = None
    actorder: Any = None

    @field_validator("num_bits", "symmetric")
    @classmethod
    def _check_floats(cls, value: int, info: ValidationInfo) -> int:
        if info.data.get("type") == "float" and value not in (8, True):
            raise unsupported("floating-point weights are read with 8 bits (e4m3) and without zero points")
        return value

    @field_validator("strategy")
    @classmethod
    def _check_extent(cls, strategy: str | None, info: ValidationInfo) -> str:
        size = info.data.get("group_size")
        strategy = strategy or {None: "tensor", -1: "channel"}.get(size, "group")
        if strategy == "group" and (size is None or size < 1):
            raise malformed(f"group_size is {size}, not a number of columns")
        if strategy == "block" and info.data.get("block_structure") is None:
            raise malformed("block_structure does not give the rows and columns of a block")
        return strategy


class _Activations(Section):
    dynamic: Literal[True] = Field(False, validate_default=True)  # static by default


class WeightGroup(Section):
    """Weights stored alike: a member of ``config_groups``.

    Attributes:
        targets: names of modules, patterns of them ("re:..."), or names of classes.
        layout: ``format`` in the configuration.
    """

    targets: list[str]
    layout: Literal["pack-quantized", "int-quantized", "float-quantized", "naive-quantized"] = Field(alias="format")
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
        return weights

    @property
    def format(self) -> QuantFormat:
        """The format of the weights; ``group_rows`` and ``group_size`` are the rows and columns of a scale."""
        weights = self.weights
        rows, columns = (None if weights.strategy == "tensor" else 1), None
        if weights.strategy == "group":
            columns = weights.group_size
        elif weights.strategy == "block":
            assert weights.block_structure is not None
            rows, columns = weights.block_structure
        return QuantFormat(weights.num_bits, columns, weights.symmetric, weights.type == "float", rows)

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
        weight = ("weight_packed", "weight_shape") if self.packed else ("weight",)
        zeros = () if self.format.symmetric else ("weight_zero_point",)
        return (*weight, "weight_scale", *zeros, *(("weight_g_idx",) if self.reordered else ()))

    def fits(self, module: str) -> bool:
        """Return whether a target's pattern matches the start of the module's name."""
        patterns = (target.removeprefix(_REGEX) for target in self.targets if target.startswith(_REGEX))
        return any(re.match(pattern, module) for pattern in patterns)
