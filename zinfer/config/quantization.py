"""Resolves all keys about quantized weights into one `Quantization`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

import torch

from zinfer.config.quantization_keys import INT8, Grouping, Part
from zinfer.config.quantization_rules import Quantization, QuantRule
from zinfer.config.reading import Given
from zinfer.config.settings import Ignored
from zinfer.errors import ConfigError

_OWN: Final = "zinfer.quantization"
_ACTIVATION: Final = "quant.activation."
_MODIFIERS: Final = (f"{_OWN}.exclude", f"{_OWN}.search", f"{_OWN}.activations", "quant.qkv.enabled")
_SUBJECTS: Final = {
    "bits": "how many bits a quantized weight has",
    "symmetric": "whether quantized weights have zero points",
    "is_float": "whether quantized weights are whole numbers",
    "grouping": "which elements share a scale",
    "group_dim": "along which dimension elements share a scale",
}
_ACTIVATION_FORMAT: Final = Part(bits=8, symmetric=True, grouping=Grouping(num_groups=1))
"""Tokens are quantized one by one, so that the whole of one is its one group."""


def resolve_quantization(given: Mapping[str, Given]) -> tuple[Quantization | None, tuple[Ignored, ...]]:
    """What the keys ask for together, and those that change nothing because no key asks for quantized weights.

    A format is put together of all that any key says: `dtype` int8 beside `q_groups` 64 gives INT8 in 64 groups. What
    none says is 8 bits, symmetric, whole numbers, a scale an output channel; DeepSpeed's default of one group is read
    by nothing there, and its INT8 weights have scales for output channels too.

    Raises:
        ConfigError: two keys contradict each other; names both.
    """
    stated = {path: item for path, item in given.items() if not _is_off(path, given)}
    parts = [(item, part) for path, item in stated.items() for part in _asked(path, item)]
    by_name = _by_name(stated)
    activations = _activations(stated)
    if activations is not None and not parts and not by_name:
        _check_weights_are_on(activations, given)
        parts.append((activations, INT8))
    if not parts and not by_name:
        reason = "no key asks for quantized weights; zinfer.quantization.bits does"
        return None, tuple(Ignored(path, reason) for path in _MODIFIERS if path in stated)
    rules = [_named_rule(item, pattern, part) for pattern, (item, part) in by_name.items()]
    if parts:
        rules.append(_general_rule(parts))
    if activations is not None:
        _check_activations(activations, rules, parts, by_name)
    return (
        Quantization(
            tuple(rules),
            include=_value(stated, f"{_OWN}.include", ()),
            exclude=_value(stated, f"{_OWN}.exclude", ()),
            qkv=_value(stated, "quant.qkv.enabled", True),
            search=_value(stated, f"{_OWN}.search", "none"),
            activations=activations is not None,
        ),
        (),
    )


def _is_off(path: str, given: Mapping[str, Given]) -> bool:
    """Whether a key is in a section that is switched off; what the switch itself says is kept."""
    if path.startswith("quant."):
        if _says_no(given, "quant.enabled"):
            return True
        if path.startswith(_ACTIVATION):
            return path != f"{_ACTIVATION}enabled" and _says_no(given, f"{_ACTIVATION}enabled")
        return _says_no(given, "quant.weight.enabled")
    return path.startswith("weight_quantization.") and _says_no(given, "weight_quantization.enabled")


def _says_no(given: Mapping[str, Given], path: str) -> bool:
    return path in given and given[path].value is False


def _asked(path: str, item: Given) -> Iterator[Part]:
    """What a key says of the format of all weights, if it says anything."""
    if path.startswith(_ACTIVATION):
        return
    if path == "dtype":
        if item.value is torch.int8:
            yield INT8
    elif isinstance(item.value, Part):
        yield item.value
    elif _is_request(path) and item.value is not False:
        yield Part()


def _is_request(path: str) -> bool:
    """Whether a key asks for quantized weights without a word on their format."""
    return path == f"{_OWN}.include" or (path.endswith(".enabled") and path.startswith(("quant.", "weight_quant")))


def _activations(stated: Mapping[str, Given]) -> Given | None:
    """The key that asks for quantized activations, if one does."""
    own, theirs = stated.get(f"{_OWN}.activations"), stated.get(f"{_ACTIVATION}enabled")
    if own is not None and theirs is not None and own.value != theirs.value:
        raise _contradiction(own, theirs, "whether activations are quantized")
    asking = [item for item in (own, theirs) if item is not None and item.value]
    for path, item in stated.items():
        if path.startswith(_ACTIVATION) and isinstance(item.value, Part):
            for name, value in item.value.stated().items():
                if value != getattr(_ACTIVATION_FORMAT, name):
                    raise ConfigError(
                        f"{item}: activations are quantized to 8 bits, symmetric, with a scale a token; remove the key"
                    )
            asking.append(item)
    if not asking:
        return None
    if own is not None and not own.value:
        raise _contradiction(asking[0], own, "whether activations are quantized")
    return asking[0]


def _check_weights_are_on(activations: Given, given: Mapping[str, Given]) -> None:
    if _says_no(given, "quant.weight.enabled"):
        off = given["quant.weight.enabled"]
        raise ConfigError(
            f"{activations} ({activations.source.label}) contradicts {off} ({off.source.label}): "
            "activations are quantized beside INT8 weights only; change one of them"
        )


def _by_name(stated: Mapping[str, Given]) -> dict[str, tuple[Given, Part]]:
    """The format that each pattern of `post_init_quant` asks for."""
    found: dict[str, tuple[Given, Part]] = {}
    for path in ("weight_quantization.post_init_quant", "quant.weight.post_init_quant"):
        for pattern, part in _value(stated, path, ()):
            first, known = found.setdefault(pattern, (stated[path], part))
            if known != part:
                raise _contradiction(first, stated[path], f'the format of "{pattern}"')
    return found


def _named_rule(item: Given, pattern: str, part: Part) -> QuantRule:
    size = part.grouping.group_size if part.grouping is not None else None
    return _rule(pattern, part, f"{item.written}.{pattern}.group_size = {size}")


def _general_rule(parts: list[tuple[Given, Part]]) -> QuantRule:
    """The one format that all keys agree on."""
    agreed: dict[str, tuple[Given, object]] = {}
    for item, part in parts:
        for name, value in part.stated().items():
            first, known = agreed.setdefault(name, (item, value))
            if known != value:
                raise _contradiction(first, item, _SUBJECTS[name])
    values: dict[str, Any] = {name: value for name, (_, value) in agreed.items()}
    origin = str(agreed["grouping"][0]) if "grouping" in agreed else ""
    return _rule(None, Part(**values), origin)


def _rule(pattern: str | None, part: Part, origin: str) -> QuantRule:
    stated: dict[str, Any] = replace(part, grouping=None).stated()
    grouping = part.grouping or Grouping()
    if part.group_dim == 0 and grouping.num_groups is not None:
        raise ConfigError(
            f"{origin} cuts a matrix row after row, and group_dim = 0 along its columns; state group_size instead"
        )
    return QuantRule(
        pattern,
        group_size=grouping.group_size,
        num_groups=grouping.num_groups,
        mlp_extra_grouping=grouping.mlp_extra_grouping,
        origin=origin,
        **stated,
    )


def _check_activations(
    activations: Given,
    rules: list[QuantRule],
    parts: list[tuple[Given, Part]],
    by_name: Mapping[str, tuple[Given, Part]],
) -> None:
    """INT8 tensor cores multiply signed bytes and add up whole rows, so a row has one scale and no zero."""
    for rule in rules:
        if rule.bits == 8 and rule.symmetric and not rule.is_float and rule.group_size is None and rule.group_dim:
            continue
        sources = parts if rule.pattern is None else [by_name[rule.pattern]]
        culprit = next(item for item, part in sources if _is_beyond_int8(part))
        raise ConfigError(
            f"{activations} ({activations.source.label}) contradicts {culprit} ({culprit.source.label}): quantized "
            "activations need weights of 8 bits, symmetric, whole numbers, without group_size or group_dim 0; "
            "change one of them"
        )


def _is_beyond_int8(part: Part) -> bool:
    has_group_size = part.grouping is not None and part.grouping.group_size is not None
    return part.bits == 4 or part.symmetric is False or bool(part.is_float) or has_group_size or part.group_dim == 0


def _contradiction(first: Given, second: Given, subject: str) -> ConfigError:
    return ConfigError(
        f"{first} ({first.source.label}) contradicts {second} ({second.source.label}): "
        f"both say {subject}; keep one of them"
    )


def _value(stated: Mapping[str, Given], path: str, default: Any) -> Any:
    return stated[path].value if path in stated else default
