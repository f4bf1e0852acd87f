"""Rules over parameter names and shapes that decide which weights are quantized, and how. Reads no files or modules.

The meanings follow DeepSpeed 0.19.8:

* A pattern is a part of the module's name (`key in module_name`), and it is an error if two patterns occur in a name
  (`inference/quantization/quantization.py`). DeepSpeed quantizes every `nn.Linear` and `nn.Embedding`; zinfer skips
  embeddings, heads, norms and routers, unless a pattern reaches into their own name.
* `group_size` neighbours share a scale along `group_dim` (`Quantizer.quantize` in `inference/quantization/utils.py`).
* A number of groups splits the whole matrix, row after row, into equal parts (`inputs.reshape(num_groups, -1)` in
  `GroupQuantizer`, `module_inject/replace_module.py`; `quantize_data` in `runtime/weight_quantizer.py`). Extra grouping
  doubles it for matrices with one side four times the other (`is_mlp` there). Without a number, every output channel
  has its own scale, as in `GroupQuantizer`.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any, Final, Literal

from zinfer.errors import ConfigError
from zinfer.kernels.quantized import QuantFormat

log = logging.getLogger(__name__)

_EMBEDDING: Final = r"\w*embed\w*|wte|wpe"
_NORM: Final = r"\w*norm\w*|ln(_\w+|\d+)?"
_HEAD: Final = (
    r"lm_head|embed_out|score|classifier|qa_outputs|lm_loss|output_projection|cls|pooler|(text|visual)_projection|"
    r"vocab_transform|(\w+_)?predictions"
)
_ROUTER: Final = r"router|gate|shared_expert_gate"
_FULL_PRECISION: Final = re.compile("|".join((_EMBEDDING, _NORM, _HEAD, _ROUTER)))
"""Matches a component of a parameter's name that keeps everything below it in full precision."""

_QKV: Final = re.compile(
    r"[qkv](_proj|_lin)?|qkv|qkv_proj|query_key_value|query|key|value|c_attn|Wqkv|q_[ab]_proj|kv_[ab]_proj(_with_mqa)?"
)
"""Matches the last component of the name of a projection to queries, keys or values."""


class QuantizationType(StrEnum):
    """The values of `QuantizationConfig.q_type`: without zero points, or with them."""

    SYMMETRIC = "symmetric"
    ASYMMETRIC = "asymmetric"


@dataclass(frozen=True)
class QuantizationConfig:
    """The object that DeepSpeed's older guides pass as `quant` or `quantization_setting`; validated when it is read.

    Args:
        q_bits: 4 or 8.
        q_type: "symmetric" or "asymmetric", or a `QuantizationType`.
        q_groups: equal parts of each matrix, row after row, with a scale each; None: one per output channel.
    """

    q_bits: int = 8
    q_type: str = QuantizationType.SYMMETRIC
    q_groups: int | None = None


@dataclass(frozen=True)
class QuantRule:
    """A format for the matrices that it fits.

    Args:
        pattern: part of the module's name; None: every matrix that is not kept in full precision.
        bits: 4 or 8.
        group_size: columns that share a scale; None: a whole row.
        group_dim: 0: rows share a scale instead: `group_size` of them, or a whole column.
        symmetric: without zero points.
        is_float: 8-bit e4m3 floating point.
        num_groups: instead of `group_size`, equal parts of the whole matrix, row after row; 1: a scale per tensor.
        mlp_extra_grouping: double `num_groups` for a matrix with one side four times the other.
        stored: instead of all these, the format in which a published checkpoint stores the matrices; only for plans
            of models without files, since nothing is written in it.
        origin: the key about groups as the user wrote it, for messages.
    """

    pattern: str | None = None
    bits: Literal[4, 8] = 8
    group_size: int | None = None
    symmetric: bool = True
    is_float: bool = False
    num_groups: int | None = None
    mlp_extra_grouping: bool = False
    group_dim: Literal[0, 1] = 1
    stored: QuantFormat | None = None
    origin: str = field(default="group_size", compare=False)

    def __post_init__(self) -> None:
        assert self.group_size is None or self.num_groups is None

    def format_for(self, name: str, rows: int, columns: int) -> QuantFormat:
        """Return the format of a matrix, or of its transpose if rows share scales.

        Raises:
            ConfigError: the groups do not fit its shape.
        """
        if self.stored is not None:
            return self.stored
        along = "columns"
        if self.group_dim == 0:
            rows, columns, along = columns, rows, "rows"
        if self.num_groups is not None:
            return self._parts_of_the_whole(name, rows, columns)
        if self.group_size is not None and columns % self.group_size:
            raise ConfigError(
                f"{self.origin} does not divide the {columns} {along} of {name}; {_nearest(columns, self.group_size)}; "
                "or leave the parameter out (zinfer.quantization.exclude)"
            )
        return QuantFormat(self.bits, self.group_size, self.symmetric, self.is_float)

    def _parts_of_the_whole(self, name: str, rows: int, columns: int) -> QuantFormat:
        assert self.num_groups is not None
        is_mlp = max(rows, columns) == 4 * min(rows, columns)
        num_groups = self.num_groups * 2 if self.mlp_extra_grouping and is_mlp else self.num_groups
        group_size: int | None = None
        group_rows: int | None = 1
        if num_groups == 1:
            group_rows = None
        elif rows % num_groups == 0:
            group_rows = rows // num_groups
        elif num_groups % rows == 0 and columns % (num_groups // rows) == 0:
            group_size = columns // (num_groups // rows)
        else:
            raise ConfigError(
                f"{self.origin}: {name} [{rows}, {columns}] cannot be cut into {num_groups} groups of whole rows, nor "
                f"of equal parts of a row; choose a divisor of the {rows} rows or a multiple that divides the columns, "
                "or leave the parameter out (zinfer.quantization.exclude)"
            )
        return QuantFormat(self.bits, group_size, self.symmetric, self.is_float, group_rows)


@dataclass(frozen=True)
class Quantization:
    """All settings of a configuration about quantized weights.

    Args:
        rules: rules with patterns, then at most one without.
        include: limits the rule without a pattern to names with these patterns; empty: no limit.
        exclude: patterns of parameters that stay in full precision, whatever the rules.
        qkv: whether projections to queries, keys and values are quantized too.
        search: "clip" narrows each group's range to minimize the squared error of the weight.
        activations: use activations of 8 bits, with a scale per token: INT8 with INT8 weights, FP8 with FP8 weights.
    """

    rules: tuple[QuantRule, ...]
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    qkv: bool = True
    search: Literal["none", "clip"] = "none"
    activations: bool = False

    def __post_init__(self) -> None:
        assert all(rule.pattern is not None for rule in self.rules[:-1])

    def format_for(self, name: str, rows: int, columns: int) -> QuantFormat | None:
        """Return the format of a parameter's matrix [rows, columns]; None: it stays in full precision.

        `rows` are output channels; stacked matrices in one parameter count as one.

        Raises:
            ConfigError: two patterns with different formats occur in the name, or the groups do not fit the shape;
                names the parameter, its shape and the key.
        """
        if name.endswith(("bias", "bias.weight")) or min(rows, columns) == 1 or self._is_excluded(name):
            return None
        rule = self._rule_for(name)
        if rule is None:
            return None
        format = rule.format_for(name, rows, columns)
        if self.activations and format.group_size is not None:
            raise ConfigError(
                f"{rule.origin}: {name} [{rows}, {columns}] would have several scales a row, but quantized activations "
                "need one; choose a divisor of the rows, or switch the activations off"
            )
        return format

    def quantizes_input(self, name: str) -> bool:
        """Return whether products with an already quantized parameter quantize their activations."""
        return self.activations and not self._is_excluded(name) and self._rule_for(name) is not None

    def groups_rows(self, name: str) -> bool:
        """Return whether rows of an already quantized parameter share scales, so that its transpose is stored."""
        rule = self._rule_for(name)
        return rule is not None and rule.group_dim == 0

    def as_document(self) -> dict[str, Any]:
        """Return the rules as JSON, without fields for messages; equivalent rules give equal documents."""
        document: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        for rule in document["rules"]:
            del rule["origin"], rule["stored"]
            if rule["group_dim"] == 1:  # left out as in older stores, which knew no other
                del rule["group_dim"]
        return document

    def check_patterns(self, names: Iterable[str]) -> None:
        """Refuse patterns that match none of a model's parameters, by their names.

        Patterns of `post_init_quant` are only logged: DeepSpeed uses one configuration for several families.

        Raises:
            ConfigError: a pattern of `include` or `exclude` matches nothing.
        """
        names = list(names)
        for pattern in self.patterns_without_a_match(names):
            fault = f"the pattern {pattern!r} occurs in no parameter of this model, whose names are like "
            fault += names[len(names) // 2]
            if pattern not in (*self.include, *self.exclude):
                log.warning("post_init_quant: %s; nothing is quantized by it", fault)
            else:
                raise ConfigError(f"quantization: {fault}; correct it, or remove it")

    def patterns_without_a_match(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the patterns that occur in no parameter's name; they are probably misspelt."""
        stated = (*(rule.pattern for rule in self.rules if rule.pattern is not None), *self.include, *self.exclude)
        known = tuple(names)
        return tuple(pattern for pattern in stated if not any(_end_of(pattern, name) for name in known))

    def _is_excluded(self, name: str) -> bool:
        is_qkv = _QKV.fullmatch(_module(name).rpartition(".")[2]) is not None
        return (is_qkv and not self.qkv) or any(_end_of(pattern, name) for pattern in self.exclude)

    def _rule_for(self, name: str) -> QuantRule | None:
        first: QuantRule | None = None
        for rule in self.rules:
            if rule.pattern is None:
                if first is None and self._is_for_all(name):
                    first = rule
            elif _claims(rule.pattern, name):
                if first is not None and replace(first, pattern=rule.pattern) != rule:
                    raise ConfigError(
                        f'post_init_quant: "{first.pattern}" and "{rule.pattern}" both occur in {name} and ask for '
                        "different formats; choose patterns of which only one occurs"
                    )
                first = first or rule
        return first

    def _is_for_all(self, name: str) -> bool:
        if self.include:
            return any(_claims(pattern, name) for pattern in self.include)
        return _kept_from(name) is None


def _claims(pattern: str, name: str) -> bool:
    """Return whether a pattern occurs in a name, and reaches into any component that keeps it in full precision."""
    kept_from = _kept_from(name) or 0
    return _end_of(pattern, name) > kept_from


def _kept_from(name: str) -> int | None:
    """Return the start of the component that keeps a parameter in full precision; None if there is none."""
    module = _module(name)
    begin = 0
    components = module.split(".")
    for component in components:
        if _FULL_PRECISION.fullmatch(component):
            return begin
        begin += len(component) + 1
    if name == module and "experts" not in components:  # not a module's weight, for example a state-space model's A_log
        return begin - len(components[-1]) - 1
    return None


def _end_of(pattern: str, name: str) -> int:
    """Return the end of the last occurrence of a pattern in a module's name; 0 if it does not occur."""
    pattern = _module(pattern)
    begin = _module(name).rfind(pattern)
    return 0 if begin < 0 else begin + len(pattern)


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def _nearest(columns: int, group_size: int) -> str:
    below = next(size for size in range(min(group_size, columns), 0, -1) if columns % size == 0)
    above = next((size for size in range(group_size, columns) if columns % size == 0), columns)
    return (
        f"the nearest sizes that do are {below} and {above}" if below < above else f"the largest that does is {below}"
    )
