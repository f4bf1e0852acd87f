"""The keys that speak of quantized weights; part of the table in `zinfer.config.keys`.

Read off DeepSpeed 0.19.8, where most of them are accepted and read by nothing: `inference/config.py` (`quant`,
`weight_quantization`), `inference/engine.py` (`quantization_setting`), `inference/quantization/` (what
`post_init_quant` and `quantized_initialization` hold), `runtime/zero/config.py` (`zero_quantized_*`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from zinfer.config import quantization_values as parsers
from zinfer.config import values
from zinfer.config.key import Key, section, supported

_BITS: Final = "bits of a quantized weight, 4 or 8"
_TYPE: Final = "symmetric, or asymmetric with zero points"
_GROUPS: Final = "even parts that each matrix is cut into, row after row; 1: a scale per tensor"
_SIZE: Final = "columns that share a scale"
_DIMENSION: Final = "1: groups are of columns; 0: of rows, and such weights are dequantized for each product"
_SWITCH: Final = "false: the section asks for nothing"


def _base(parent: str) -> Iterable[Key]:
    """The keys of `BaseQuantConfig`, with the older guides' spelling."""
    yield supported(f"{parent}.enabled", values.flag, _SWITCH)
    yield supported(f"{parent}.num_bits", parsers.bits, _BITS)
    yield supported(f"{parent}.q_bits", parsers.bits, "older spelling of num_bits")
    yield supported(f"{parent}.q_type", parsers.q_type, _TYPE)
    yield supported(f"{parent}.q_groups", parsers.q_groups, _GROUPS)


def _weights(parent: str) -> Iterable[Key]:
    """The keys of `WeightQuantConfig`."""
    yield from _base(parent)
    yield supported(f"{parent}.post_init_quant", parsers.post_init_quant, "formats by parts of parameters' names")
    inner = f"{parent}.quantized_initialization"
    yield section(inner, "the format of every weight that may be quantized")
    yield supported(f"{inner}.num_bits", parsers.bits, _BITS)
    yield supported(f"{inner}.group_size", parsers.group_size, _SIZE)
    yield supported(f"{inner}.group_dim", parsers.group_dim, _DIMENSION)
    yield supported(f"{inner}.symmetric", parsers.symmetric, "without zero points")


QUANTIZATION_KEYS: Final[tuple[Key, ...]] = (
    supported("quantization_setting", parsers.quantization_setting, "groups, or (mlp_extra_grouping, groups)"),
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
        supported(f"zero_optimization.{name}", parsers.int8_if_true, "INT8 weights, at home and on the way")
        for name in ("zero_quantized_weights", "zero_quantized_nontrainable_weights")
    ),
    section("zinfer.quantization", "quantized weights"),
    supported("zinfer.quantization.bits", parsers.bits, f"{_BITS}; 8 by default", default=8),
    supported("zinfer.quantization.group_size", parsers.group_size, f"{_SIZE}; by default a whole row"),
    supported("zinfer.quantization.symmetric", parsers.symmetric, "without zero points", default=True),
    supported("zinfer.quantization.format", parsers.number_format, "whole numbers, or 8 bits e4m3", default="int"),
    supported("zinfer.quantization.include", parsers.patterns, "only parameters in whose names one of these occurs"),
    supported("zinfer.quantization.exclude", parsers.patterns, "not those in whose names one of these occurs"),
    supported(
        "zinfer.quantization.search",
        values.choice("none", "clip"),
        "clip: narrows ranges to the least squared error",
        default="none",
    ),
    supported("zinfer.quantization.activations", values.flag, "INT8 activations beside INT8 weights", default=False),
)
