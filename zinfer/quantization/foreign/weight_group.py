"""A group of a compressed-tensors config: how the weights of some modules are stored.

The fields are those of compressed-tensors 0.20 (quantization/quant_scheme.py: `QuantizationScheme`, quant_args.py:
`QuantizationArgs`).
"""

import re
from dataclasses import dataclass
from typing import Final, Literal

from zinfer.kernels.quantized import QuantFormat
from zinfer.quantization.foreign.parts import Section

ANY_MODULE: Final = "Linear"
_REGEX: Final = "re:"
_TYPES: Final = {
    "pack-quantized": ("int",),
    "int-quantized": ("int",),
    "float-quantized": ("float",),
    "naive-quantized": ("int", "float"),
}
_REORDERED: Final = ("group", "dynamic", "true")


@dataclass(frozen=True)
class WeightGroup:
    """Weights stored alike.

    Args:
        targets: names of modules, patterns of them ("re:..."), or names of classes.
        format: of the weights as matrices; ``group_rows`` and ``group_size`` are the rows and columns of a scale.
        packed: in words, else one element a code.
        reordered: in activation order, with a group for each column.
    """

    targets: tuple[str, ...]
    format: QuantFormat
    packed: bool
    reordered: bool

    @classmethod
    def from_config(cls, group: Section, default_format: str) -> "WeightGroup":
        """A member of ``config_groups``.

        Raises:
            CheckpointError: something that is not supported; names the key.
        """
        weights = group.section("weights")
        if weights is None:
            raise group.unsupported("weights", "groups that quantize activations only are not read")
        layout, type = group.text("format", default_format), weights.text("type", "int")
        if layout not in _TYPES:
            raise group.unsupported(
                "format", f"weights in the format {layout!r} are not read ({', '.join(_TYPES)} are)"
            )
        if type not in _TYPES[layout]:
            raise weights.unsupported("type", f"weights in the format {layout} are of type {_TYPES[layout][0]}")
        packed = layout == "pack-quantized"
        group_rows, group_size = _extent(weights, packed)
        format = QuantFormat(_bits(weights, type), group_size, _symmetric(weights, type), type == "float", group_rows)
        actorder = str(weights.members.get("actorder")).lower()
        return cls(_targets(group), format, packed, actorder in _REORDERED)

    @property
    def required(self) -> tuple[str, ...]:
        """The parts that each of its modules has."""
        weight = ("weight_packed", "weight_shape") if self.packed else ("weight",)
        zeros = () if self.format.symmetric else ("weight_zero_point",)
        return (*weight, "weight_scale", *zeros, *(("weight_g_idx",) if self.reordered else ()))

    def names(self, module: str) -> bool:
        """Whether a target is the module's name."""
        return module in self.targets

    def fits(self, module: str) -> bool:
        """Whether a target's pattern is found where the module's name begins."""
        patterns = (target.removeprefix(_REGEX) for target in self.targets if target.startswith(_REGEX))
        return any(re.match(pattern, module) for pattern in patterns)


def _targets(group: Section) -> tuple[str, ...]:
    targets = group.members.get("targets")
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise group.unusable("targets", "not a list of texts; restore config.json")
    for target in targets:
        try:
            re.compile(target.removeprefix(_REGEX) if target.startswith(_REGEX) else "")
        except re.error as error:
            raise group.unusable("targets", f"{target!r} is no pattern ({error}); restore config.json") from error
    return tuple(targets)


def _bits(weights: Section, type: str) -> Literal[4, 8]:
    bits = weights.integer("num_bits", 8)
    if type == "float" and bits != 8:
        raise weights.unsupported("num_bits", "floating-point weights are read with 8 bits (e4m3)")
    if bits not in (4, 8):
        raise weights.unsupported("num_bits", "integer weights are read with 4 or 8 bits")
    return 4 if bits == 4 else 8


def _symmetric(weights: Section, type: str) -> bool:
    symmetric = weights.flag("symmetric", True)
    if type == "float" and not symmetric:
        raise weights.unsupported("symmetric", "floating-point weights with zero points are not read")
    return symmetric


def _extent(weights: Section, packed: bool) -> tuple[int | None, int | None]:
    """Rows and columns that share a scale; None: all of them."""
    size = weights.members.get("group_size")
    inferred: dict[int | None, str] = {None: "tensor", -1: "channel"}
    strategy = weights.text("strategy", inferred.get(size, "group"))
    if strategy == "tensor":
        return None, None
    if strategy == "channel":
        return 1, None
    if strategy == "group":
        return 1, _positive(weights, "group_size", size)
    if strategy == "block" and not packed:
        block = weights.members.get("block_structure")
        if not isinstance(block, list) or len(block) != 2:
            raise weights.unusable("block_structure", "not the rows and columns of a block; restore config.json")
        return _positive(weights, "block_structure", block[0]), _positive(weights, "block_structure", block[1])
    raise weights.unsupported(
        "strategy", "weights are read with a scale per tensor, channel or group, or, if not packed, block"
    )


def _positive(weights: Section, key: str, value: object) -> int:
    if not isinstance(value, int) or value < 1:
        raise weights.unusable(key, "not a number of columns; restore config.json")
    return value
