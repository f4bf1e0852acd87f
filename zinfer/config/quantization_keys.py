"""The keys that speak of quantized weights, part of the table in `zinfer.config.keys`, and the parsers of their values.

Read off DeepSpeed 0.19.8, where most of them are accepted and read by nothing: `inference/config.py` (`quant`,
`weight_quantization`), `inference/engine.py` (`quantization_setting`), `inference/quantization/` (what
`post_init_quant` and `quantized_initialization` hold), `runtime/zero/config.py` (`zero_quantized_*`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any, Final

from zinfer.config.key import Key, section, supported
from zinfer.config.quantization_rules import QuantizationConfig
from zinfer.config.values import Parser, Unusable, choice, count, flag, number_of

_PATTERN: Final = re.compile(r"[\w.-]+")
_PATTERN_EXPECTED: Final = 'a part of parameter names, such as "fc1" or "self_attn.q_proj", without wildcards'
_SETTING_EXPECTED: Final = "a number of groups, or (mlp_extra_grouping, groups) such as [true, 8]"


class Part(dict[str, Any]):
    """What one key, or several that agree, say of a format, by fields of `QuantRule`; any asks for quantized weights.

    A key that speaks of groups states all three fields about them: ways to group exclude one another.
    """


INT8: Final = Part(bits=8, is_float=False)
FP8: Final = Part(bits=8, symmetric=True, is_float=True)


def bits(value: object) -> Part:
    """4 or 8."""
    number = number_of(value)
    if isinstance(number, bool) or number not in (4, 8):
        raise Unusable("4 or 8")
    return Part(bits=4 if number == 4 else 8)


def q_type(value: object) -> Part:
    """DeepSpeed's `QuantTypeEnum`."""
    return Part(symmetric=choice("symmetric", "asymmetric")(value) == "symmetric")


def symmetric(value: object) -> Part:
    """True or false; DeepSpeed takes false only."""
    return Part(symmetric=flag(value))


def group_size(value: object) -> Part:
    """Columns that share a scale."""
    return _grouping(group_size=count(1)(value))


def q_groups(value: object) -> Part:
    """Parts of a matrix, row after row."""
    return _grouping(num_groups=count(1)(value))


def group_dim(value: object) -> Part:
    """The dimension of a weight [rows, columns] whose neighbours share a scale: 1, or 0 for rows."""
    return Part(group_dim=count(0, 1)(value))


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
    return tuple(_pattern(item, str(index)) for index, item in enumerate(value)) or None


def post_init_quant(value: object) -> dict[str, Part] | None:
    """A format for each pattern; an empty object says nothing."""
    if not isinstance(value, Mapping):
        raise Unusable('an object {...} of patterns, such as {"fc1": {"num_bits": 4, "group_size": 64}}')
    found = {}
    for name, keys in value.items():
        pattern = _pattern(name, str(name))
        if not isinstance(keys, Mapping):
            raise Unusable('an object {...}, such as {"num_bits": 4, "group_size": 64}', pattern, keys)
        found[pattern] = _merged(f"{pattern}.", keys, _GROUP_KEYS)
    return found or None


def quantization_setting(value: object) -> Part:
    """A number of groups, with extra grouping for the MLP or without, as `_init_quantization_setting` of DeepSpeed's
    `inference/engine.py` unpacks it, or the other way round, as its inference tutorial writes it; also a
    `QuantizationConfig`."""
    if isinstance(value, QuantizationConfig):
        stated = {name: part for name, part in asdict(value).items() if part is not None}
        return _merged("", stated, _OLDER_KEYS)
    extra: object = False
    groups = value
    if isinstance(value, (tuple, list)):
        extra, groups = value if len(value) == 2 else (None, None)
        if isinstance(groups, bool):
            extra, groups = groups, extra
    try:
        return _grouping(num_groups=count(1)(groups), mlp_extra_grouping=flag(extra))
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


def _grouping(group_size: object = None, num_groups: object = None, mlp_extra_grouping: bool = False) -> Part:
    return Part(group_size=group_size, num_groups=num_groups, mlp_extra_grouping=mlp_extra_grouping)


def _merged(prefix: str, keys: Mapping[str, object], known: Mapping[str, Parser]) -> Part:
    """What keys that say different things say together."""
    merged = Part()
    for name, value in keys.items():
        if name not in known:
            raise Unusable(f"one of the keys {', '.join(known)}", f"{prefix}{name}", value)
        try:
            part = known[name](value)
        except Unusable as fault:
            fault.inside, fault.value = f"{prefix}{name}", value
            raise
        assert isinstance(part, Part)
        merged.update(part)
    return merged


def _pattern(name: object, inside: str) -> str:
    if not isinstance(name, str) or not _PATTERN.fullmatch(name):
        raise Unusable(_PATTERN_EXPECTED, inside, name)
    return name


_BITS: Final = "bits of a quantized weight, 4 or 8"
_SIZE: Final = "columns that share a scale"
_DIMENSION: Final = "1: groups are of columns; 0: of rows, and such weights are dequantized for each product"


def _base(parent: str) -> Iterable[Key]:
    """The keys of `BaseQuantConfig`, with the older guides' spelling."""
    yield supported(f"{parent}.enabled", flag, "false: the section asks for nothing")
    yield supported(f"{parent}.num_bits", bits, _BITS)
    yield supported(f"{parent}.q_bits", bits, "older spelling of num_bits")
    yield supported(f"{parent}.q_type", q_type, "symmetric, or asymmetric with zero points")
    groups = "even parts that each matrix is cut into, row after row; 1: a scale per tensor"
    yield supported(f"{parent}.q_groups", q_groups, groups)


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
    supported("quant.qkv.enabled", flag, "false: they stay in full precision", default=True),
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
        choice("none", "clip"),
        "clip: narrows ranges to the least squared error",
        default="none",
    ),
    supported("zinfer.quantization.activations", flag, "INT8 activations beside INT8 weights", default=False),
)
