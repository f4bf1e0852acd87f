"""The keys that speak of quantized weights, part of the table in `zinfer.config.keys`, and the parsers of their values.

Read off DeepSpeed 0.19.8, where most of them are accepted and read by nothing: `inference/config.py` (`quant`,
`weight_quantization`), `inference/engine.py` (`quantization_setting`), `inference/quantization/` (what
`post_init_quant` and `quantized_initialization` hold), `runtime/zero/config.py` (`zero_quantized_*`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Final, Literal

from zinfer.config import values
from zinfer.config.key import Key, section, supported
from zinfer.config.quantization_rules import QuantizationConfig
from zinfer.config.values import Parser, Unusable, choice, count, flag, number_of

_PATTERN: Final = re.compile(r"[\w.-]+")
_PATTERN_EXPECTED: Final = 'a part of parameter names, such as "fc1" or "self_attn.q_proj", without wildcards'
_SETTING_EXPECTED: Final = "a number of groups, or (mlp_extra_grouping, groups) such as [true, 8]"


@dataclass(frozen=True)
class Grouping:
    """What shares a scale: so many columns, or an even part of the whole matrix."""

    group_size: int | None = None
    num_groups: int | None = None
    mlp_extra_grouping: bool = False


@dataclass(frozen=True)
class Part:
    """What one key, or several that agree, say of a format; None: nothing. Any of them asks for quantized weights."""

    bits: Literal[4, 8] | None = None
    symmetric: bool | None = None
    is_float: bool | None = None
    grouping: Grouping | None = None
    group_dim: Literal[0, 1] | None = None

    def stated(self) -> dict[str, object]:
        """The fields that say something."""
        pairs = ((item.name, getattr(self, item.name)) for item in fields(self))
        return {name: value for name, value in pairs if value is not None}


INT8: Final = Part(bits=8, is_float=False)
FP8: Final = Part(bits=8, symmetric=True, is_float=True)


def bits(value: object) -> Part:
    """4 or 8."""
    value = number_of(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value not in (4, 8):
        raise Unusable("4 or 8")
    return Part(bits=4 if value == 4 else 8)


def q_type(value: object) -> Part:
    """DeepSpeed's `QuantTypeEnum`."""
    return Part(symmetric=choice("symmetric", "asymmetric")(value) == "symmetric")


def symmetric(value: object) -> Part:
    """True or false; DeepSpeed takes false only."""
    return Part(symmetric=flag(value))


def group_size(value: object) -> Part:
    """Columns that share a scale."""
    return Part(grouping=Grouping(group_size=_positive(value)))


def q_groups(value: object) -> Part:
    """Parts of a matrix, row after row."""
    return Part(grouping=Grouping(num_groups=_positive(value)))


def group_dim(value: object) -> Part:
    """The dimension of a weight [rows, columns] whose neighbours share a scale: 1, or 0 for rows."""
    return Part(group_dim=1 if count(0, 1)(value) == 1 else 0)


def number_format(value: object) -> Part:
    """Whole numbers or floating-point ones."""
    return FP8 if choice("int", "fp8")(value) == "fp8" else Part(is_float=False)


def int8_if_true(value: object) -> Part | None:
    """True asks for INT8 weights, false for nothing."""
    return INT8 if flag(value) else None


def patterns(value: object) -> tuple[str, ...] | None:
    """A list of parts of names; an empty one says nothing."""
    if not isinstance(value, (list, tuple)):
        raise Unusable('a list of parts of parameter names, such as ["fc1", "self_attn.q_proj"]')
    for index, item in enumerate(value):
        if not _is_pattern(item):
            raise Unusable(_PATTERN_EXPECTED, str(index), item)
    return tuple(value) or None


def post_init_quant(value: object) -> tuple[tuple[str, Part], ...] | None:
    """A format for each pattern; an empty object says nothing."""
    if not isinstance(value, Mapping):
        raise Unusable('an object {...} of patterns, such as {"fc1": {"num_bits": 4, "group_size": 64}}')
    return tuple((_pattern(name), _format(str(name), keys)) for name, keys in value.items()) or None


def quantization_setting(value: object) -> Part:
    """A number of groups, with extra grouping for the MLP or without, as `_init_quantization_setting` of DeepSpeed's
    `inference/engine.py` unpacks it, or the other way round, as its inference tutorial writes it; also a
    `QuantizationConfig`."""
    if isinstance(value, QuantizationConfig):
        stated = {name: part for name, part in value.as_section().items() if part is not None}
        return _merged("", stated, _OLDER_KEYS)
    extra: object = False
    groups = value
    if isinstance(value, (tuple, list)):
        extra, groups = value if len(value) == 2 else (None, None)
        if isinstance(groups, bool):
            extra, groups = groups, extra
    try:
        return Part(grouping=Grouping(num_groups=_positive(groups), mlp_extra_grouping=flag(extra)))
    except Unusable:
        raise Unusable(_SETTING_EXPECTED) from None


_GROUP_KEYS: Final[dict[str, Parser]] = {
    "num_bits": bits,
    "group_size": group_size,
    "group_dim": group_dim,
    "symmetric": symmetric,
}
"""What `Quantizer` of DeepSpeed's `inference/quantization/utils.py` reads."""

_OLDER_KEYS: Final[dict[str, Parser]] = {"q_bits": bits, "q_type": q_type, "q_groups": q_groups}


def _format(pattern: str, keys: object) -> Part:
    if not isinstance(keys, Mapping):
        raise Unusable('an object {...}, such as {"num_bits": 4, "group_size": 64}', pattern, keys)
    return _merged(f"{pattern}.", keys, _GROUP_KEYS)


def _merged(prefix: str, keys: Mapping[str, object], known: Mapping[str, Parser]) -> Part:
    """What keys that say different things say together."""
    stated: dict[str, object] = {}
    for name, value in keys.items():
        parse = known.get(name)
        if parse is None:
            raise Unusable(f"one of the keys {', '.join(known)}", f"{prefix}{name}", value)
        try:
            part = parse(value)
        except Unusable as expected:
            raise Unusable(str(expected), f"{prefix}{name}", value) from None
        assert isinstance(part, Part)
        stated |= part.stated()
    return Part(**stated)  # type: ignore[arg-type]


def _positive(value: object) -> int:
    number = count(1)(value)
    assert isinstance(number, int)
    return number


def _pattern(name: object) -> str:
    if not _is_pattern(name):
        raise Unusable(_PATTERN_EXPECTED, str(name), name)
    return str(name)


def _is_pattern(name: object) -> bool:
    return isinstance(name, str) and _PATTERN.fullmatch(name) is not None


_BITS: Final = "bits of a quantized weight, 4 or 8"
_TYPE: Final = "symmetric, or asymmetric with zero points"
_GROUPS: Final = "even parts that each matrix is cut into, row after row; 1: a scale per tensor"
_SIZE: Final = "columns that share a scale"
_DIMENSION: Final = "1: groups are of columns; 0: of rows, and such weights are dequantized for each product"
_SWITCH: Final = "false: the section asks for nothing"


def _base(parent: str) -> Iterable[Key]:
    """The keys of `BaseQuantConfig`, with the older guides' spelling."""
    yield supported(f"{parent}.enabled", values.flag, _SWITCH)
    yield supported(f"{parent}.num_bits", bits, _BITS)
    yield supported(f"{parent}.q_bits", bits, "older spelling of num_bits")
    yield supported(f"{parent}.q_type", q_type, _TYPE)
    yield supported(f"{parent}.q_groups", q_groups, _GROUPS)


def _weights(parent: str) -> Iterable[Key]:
    """The keys of `WeightQuantConfig`."""
    yield from _base(parent)
    yield supported(f"{parent}.post_init_quant", post_init_quant, "formats by parts of parameters' names")
    inner = f"{parent}.quantized_initialization"
    yield section(inner, "the format of every weight that may be quantized")
    yield supported(f"{inner}.num_bits", bits, _BITS)
    yield supported(f"{inner}.group_size", group_size, _SIZE)
    yield supported(f"{inner}.group_dim", group_dim, _DIMENSION)
    yield supported(f"{inner}.symmetric", symmetric, "without zero points")


QUANTIZATION_KEYS: Final[tuple[Key, ...]] = (
    supported("quantization_setting", quantization_setting, "groups, or (mlp_extra_grouping, groups)"),
    section("quant", "quantized weights"),
    *_base("quant"),
    section("quant.weight", "quantized weights"),
    *_weights("quant.weight"),
    section("quant.activation", "INT8 activations beside INT8 weights"),
    *_base("quant.activation"),
    section("quant.qkv", "the projections to queries, keys and values"),
    supported("quant.qkv.enabled", values.flag, "false: they stay in full precision", default=True),
    section("weight_quantization", "quantized weights"),
    *_weights("weight_quantization"),
    *(
        supported(f"zero_optimization.{name}", int8_if_true, "INT8 weights, at home and on the way")
        for name in ("zero_quantized_weights", "zero_quantized_nontrainable_weights")
    ),
    section("zinfer.quantization", "quantized weights"),
    supported("zinfer.quantization.bits", bits, f"{_BITS}; 8 by default", default=8),
    supported("zinfer.quantization.group_size", group_size, f"{_SIZE}; by default a whole row"),
    supported("zinfer.quantization.symmetric", symmetric, "without zero points", default=True),
    supported("zinfer.quantization.format", number_format, "whole numbers, or 8 bits e4m3", default="int"),
    supported("zinfer.quantization.include", patterns, "only parameters in whose names one of these occurs"),
    supported("zinfer.quantization.exclude", patterns, "not those in whose names one of these occurs"),
    supported(
        "zinfer.quantization.search",
        values.choice("none", "clip"),
        "clip: narrows ranges to the least squared error",
        default="none",
    ),
    supported("zinfer.quantization.activations", values.flag, "INT8 activations beside INT8 weights", default=False),
)
