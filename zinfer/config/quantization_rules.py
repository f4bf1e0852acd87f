"""Which weights are quantized, and how: rules over parameter names and shapes. Reads no files and knows no modules.

The meanings are those of DeepSpeed 0.19.8, read there:

* A pattern is a part of the module's name (`key in module_name`), and a module in which two patterns occur is an error
  (`inference/quantization/quantization.py`). There every `nn.Linear` and `nn.Embedding` is quantized; here embeddings,
  heads, norms and routers are not, unless a pattern reaches into their own name.
* `group_size` neighbours share a scale along `group_dim` (`Quantizer.quantize` in `inference/quantization/utils.py`).
* A number of groups cuts the whole matrix, row after row, into so many even parts (`inputs.reshape(num_groups, -1)` in
  `GroupQuantizer`, `module_inject/replace_module.py`; `quantize_data` in `runtime/weight_quantizer.py`). Extra grouping
  doubles it for matrices four times as long as wide or as wide as long (`is_mlp` there). `GroupQuantizer` without a
  number gives every output channel a scale of its own, and so do rules without groups.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Literal

from zinfer.errors import ConfigError
from zinfer.kernels.quantized import QuantFormat

_EMBEDDING: Final = r"\w*embed\w*|wte|wpe"
_NORM: Final = r"\w*norm\w*|ln(_\w+|\d+)?"
_HEAD: Final = (
    r"lm_head|embed_out|score|classifier|qa_outputs|lm_loss|output_projection|cls|pooler|(text|visual)_projection|"
    r"vocab_transform|(\w+_)?predictions"
)
_ROUTER: Final = r"router|gate|shared_expert_gate"
_FULL_PRECISION: Final = re.compile("|".join((_EMBEDDING, _NORM, _HEAD, _ROUTER)))
"""A component of a parameter's name that keeps everything below it in full precision."""

_QKV: Final = re.compile(
    r"[qkv](_proj|_lin)?|qkv|qkv_proj|query_key_value|query|key|value|c_attn|Wqkv|q_[ab]_proj|kv_[ab]_proj(_with_mqa)?"
)
"""The last component of the name of a projection to queries, keys or values."""


@dataclass(frozen=True)
class QuantizationConfig:
    """What the older guides of DeepSpeed pass as `quant` or `quantization_setting`; checked where it is passed.

    Args:
        q_bits: 4 or 8.
        q_type: "symmetric" or "asymmetric".
        q_groups: parts that each matrix is cut into, row after row, with a scale each; None: one an output channel.
    """

    q_bits: int = 8
    q_type: str = "symmetric"
    q_groups: int | None = None


@dataclass(frozen=True)
class QuantRule:
    """A format for the matrices that it fits.

    Args:
        pattern: part of the module's name; None: every matrix that is not kept in full precision.
        bits: 4 or 8.
        group_size: columns that share a scale; None: a whole row.
        group_dim: 0: rows share a scale instead, so many of them, or a whole column.
        symmetric: without zero points.
        is_float: 8 bits as e4m3 floating point.
        num_groups: instead of `group_size`, even parts of the whole matrix, row after row; 1: a scale per tensor.
        mlp_extra_grouping: twice `num_groups` for a matrix four times as long as wide, or as wide as long.
        origin: the key that states the groups, as the user wrote it; for messages.
    """

    pattern: str | None = None
    bits: Literal[4, 8] = 8
    group_size: int | None = None
    symmetric: bool = True
    is_float: bool = False
    num_groups: int | None = None
    mlp_extra_grouping: bool = False
    group_dim: Literal[0, 1] = 1
    origin: str = field(default="group_size", compare=False)

    def __post_init__(self) -> None:
        assert self.group_size is None or self.num_groups is None

    def format_for(self, name: str, rows: int, columns: int) -> QuantFormat:
        """The format of a matrix that the rule fits, of its transpose where rows share scales.

        Raises:
            ConfigError: it cannot be grouped so.
        """
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
                f"of even parts of a row; choose a divisor of the {rows} rows or a multiple that divides the columns, "
                "or leave the parameter out (zinfer.quantization.exclude)"
            )
        return QuantFormat(self.bits, group_size, self.symmetric, self.is_float, group_rows)


@dataclass(frozen=True)
class Quantization:
    """All that a configuration says about quantized weights.

    Args:
        rules: those with patterns come before the one without, if there is one.
        include: patterns to which the rule without one is limited; empty: it has no limits.
        exclude: patterns of what stays in full precision, whatever a rule says.
        qkv: the projections to queries, keys and values are quantized too.
        search: "clip" narrows each group's range to where the weight's squared error is least.
        activations: products take INT8 activations, a scale a token, with the INT8 weights.
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
        """The format of the matrix [rows, columns] of a parameter; None: it stays in full precision.

        `rows` are output channels; stacked matrices in one parameter count as one.

        Raises:
            ConfigError: two patterns with different formats occur in the name, or the shape cannot be grouped as the
                rule says; names the parameter, its shape and the key.
        """
        if name.endswith(("bias", "bias.weight")) or min(rows, columns) == 1 or self._is_excluded(name):
            return None
        rule = self._rule_for(name)
        if rule is None:
            return None
        format = rule.format_for(name, rows, columns)
        if self.activations and format.group_size is not None:
            raise ConfigError(
                f"{rule.origin}: {name} [{rows}, {columns}] would have several scales a row, and a product with "
                "quantized activations takes one; choose a divisor of the rows, or switch the activations off"
            )
        return format

    def quantizes_input(self, name: str) -> bool:
        """Whether products with a parameter that is quantized already quantize what it is multiplied with."""
        return self.activations and not self._is_excluded(name) and self._rule_for(name) is not None

    def groups_rows(self, name: str) -> bool:
        """Whether rows of a parameter that is quantized share scales, so that its transpose is what is stored."""
        rule = self._rule_for(name)
        return rule is not None and rule.group_dim == 0

    def as_document(self) -> dict[str, Any]:
        """The rules as JSON, without what only messages need: equal for rules that do the same."""
        document: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        for rule in document["rules"]:
            del rule["origin"]
            if rule["group_dim"] == 1:  # as in the documents of stores that were written before there was another
                del rule["group_dim"]
        return document

    def patterns_without_a_match(self, names: Iterable[str]) -> tuple[str, ...]:
        """Patterns that occur in none of the parameters' names: misspelt ones, most likely."""
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
    """Whether a pattern occurs in a name, and reaches into what would keep it in full precision."""
    kept_from = _kept_from(name) or 0
    return _end_of(pattern, name) > kept_from


def _kept_from(name: str) -> int | None:
    """Where the component begins for which a parameter stays in full precision; None: it does not."""
    module = _module(name)
    begin = 0
    components = module.split(".")
    for component in components:
        if _FULL_PRECISION.fullmatch(component):
            return begin
        begin += len(component) + 1
    if name == module and "experts" not in components:  # no module's weight: a state-space model's A_log, say
        return begin - len(components[-1]) - 1
    return None


def _end_of(pattern: str, name: str) -> int:
    """Where the last occurrence of a pattern in a module's name ends; 0: it does not occur."""
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
