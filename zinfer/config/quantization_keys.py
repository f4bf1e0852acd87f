"""The keys of quantized weights, part of the table in `zinfer.config.keys`, and the parsers of their values.

Source: DeepSpeed 0.19.8, which accepts most of them but does not use them: `inference/config.py` (`quant`,
`weight_quantization`), `inference/engine.py` (`quantization_setting`), `inference/quantization/` (contents of
`post_init_quant` and `quantized_initialization`), `runtime/zero/config.py` (`zero_quantized_*`).
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
    """Part of a format, stated by one or more keys, by fields of `QuantRule`; any part requests quantized weights.

    A key about groups sets all three fields about them, since ways to group exclude one another.
    """


INT8: Final = Part(bits=8, is_float=False)
FP8: Final = Part(bits=8, symmetric=True, is_float=True)


def bits(value: object) -> Part:
    """Parse 4 or 8."""
    number = number_of(value)
    if isinstance(number, bool) or number not in (4, 8):
        raise Unusable("4 or 8")
    return Part(bits=4 if number == 4 else 8)


def q_type(value: object) -> Part:
    """Parse DeepSpeed's `QuantTypeEnum`."""
    return Part(symmetric=choice("symmetric", "asymmetric")(value) == "symmetric")


def symmetric(value: object) -> Part:
    """Parse true or false; DeepSpeed accepts only false."""
    return Part(symmetric=flag(value))


def group_size(value: object) -> Part:
    """Parse the number of columns that share a scale."""
    return _grouping(group_size=count(1)(value))


def q_groups(value: object) -> Part:
    """Parse the number of parts of a matrix, row after row."""
    return _grouping(num_groups=count(1)(value))


def group_dim(value: object) -> Part:
    """Parse the dimension of a weight [rows, columns] along which neighbours share a scale: 1, or 0 for rows."""
    return Part(group_dim=count(0, 1)(value))


def number_format(value: object) -> Part:
    """Parse "int" or "fp8"."""
    return FP8 if choice("int", "fp8")(value) == "fp8" else Part(is_float=False)


def int8_if_true(value: object) -> Part | None:
    """Parse a switch: true requests INT8 weights, false nothing."""
    return INT8 if flag(value) else None


def patterns(value: object) -> tuple[str, ...] | None:
    """Parse a list of parts of names; None if empty."""
    if not isinstance(value, (list, tuple)):
        raise Unusable('a list of parts of parameter names, such as ["fc1", "self_attn.q_proj"]')
    return tuple(_pattern(item, str(index)) for index, item in enumerate(value)) or None


def post_init_quant(value: object) -> dict[str, Part] | None:
    """Parse a format for each pattern; None if empty."""
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
    """Parse a number of groups, optionally with MLP extra grouping, or a `QuantizationConfig`.

    The pair may have the order of `_init_quantization_setting` in DeepSpeed's `inference/engine.py`, or the reverse one
    of its inference tutorial.
    """
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
"""Keys that `Quantizer` in DeepSpeed's `inference/quantization/utils.py` reads."""

_OLDER_KEYS: Final[dict[str, Parser]] = {"q_bits": bits, "q_type": q_type, "q_groups": q_groups}


def _grouping(group_size: object = None, num_groups: object = None, mlp_extra_grouping: bool = False) -> Part:
    return Part(group_size=group_size, num_groups=num_groups, mlp_extra_grouping=mlp_extra_grouping)


def _merged(prefix: str, keys: Mapping[str, object], known: Mapping[str, Parser]) -> Part:
    """Parse keys with different meanings and combine their parts."""
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
_DIMENSION: Final = "1: groups of columns; 0: groups of rows, and such weights are dequantized for each product"


def _base(parent: str) -> Iterable[Key]:
    """Yield the keys of `BaseQuantConfig`, including the older guides' names."""
    yield supported(f"{parent}.enabled", flag, "false: ignore the section")
    yield supported(f"{parent}.num_bits", bits, _BITS)
    yield supported(f"{parent}.q_bits", bits, "older spelling of num_bits")
    yield supported(f"{parent}.q_type", q_type, "symmetric, or asymmetric with zero points")
    groups = "even parts that each matrix is cut into, row after row; 1: a scale per tensor"
    yield supported(f"{parent}.q_groups", q_groups, groups)


def _weights(parent: str) -> Iterable[Key]:
    """Yield the keys of `WeightQuantConfig`."""
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
    section("quant.activation", "INT8 activations with INT8 weights"),
    *_base("quant.activation"),
    section("quant.qkv", "the projections to queries, keys and values"),
    supported("quant.qkv.enabled", flag, "false: they stay in full precision", default=True),
    section("weight_quantization", "quantized weights"),
    *_weights("weight_quantization"),
    *(
        supported(f"zero_optimization.{name}", int8_if_true, "INT8 weights, in memory and in transfer")
        for name in ("zero_quantized_weights", "zero_quantized_nontrainable_weights")
    ),
    section("zinfer.quantization", "quantized weights"),
    supported("zinfer.quantization.bits", bits, f"{_BITS}; 8 by default", default=8),
    supported("zinfer.quantization.group_size", group_size, f"{_SIZE}; by default a whole row"),
    supported("zinfer.quantization.symmetric", symmetric, "without zero points", default=True),
    supported("zinfer.quantization.format", number_format, "integers, or 8-bit e4m3 floats", default="int"),
    supported("zinfer.quantization.include", patterns, "only parameters whose names contain one of these"),
    supported("zinfer.quantization.exclude", patterns, "skip parameters whose names contain one of these"),
    supported(
        "zinfer.quantization.search",
        choice("none", "clip"),
        "clip: narrow ranges to minimize the squared error",
        default="none",
    ),
    supported(
        "zinfer.quantization.activations",
        flag,
        "activations quantized as the weights are: INT8 with INT8 weights, FP8 with FP8 weights",
        default=False,
    ),
)
