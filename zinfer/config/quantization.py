"""Resolve all keys about quantized weights into one `Quantization`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from zinfer.config.quantization_keys import INT8, Part
from zinfer.config.quantization_rules import Quantization, QuantRule
from zinfer.config.reading import Given, contradiction
from zinfer.config.settings import Ignored
from zinfer.errors import ConfigError

_OWN: Final = "zinfer.quantization"
_ACTIVATION: Final = "quant.activation."
_MODIFIERS: Final = (f"{_OWN}.exclude", f"{_OWN}.search", f"{_OWN}.activations", "quant.qkv.enabled")
_SUBJECTS: Final = {
    "bits": "how many bits a quantized weight has",
    "symmetric": "whether quantized weights have zero points",
    "is_float": "whether quantized weights are whole numbers",
    **dict.fromkeys(("group_size", "num_groups", "mlp_extra_grouping"), "which elements share a scale"),
    "group_dim": "along which dimension elements share a scale",
}
_INT8_ACTIVATIONS: Final = Part(bits=8, symmetric=True, group_size=None, num_groups=1, mlp_extra_grouping=False)
"""Allowed settings of activations: each token has one scale, so a token is one group."""

_Asked = tuple[Given, Part]
"""A key, and the part of a format that it states."""


def resolve_quantization(given: Mapping[str, Given]) -> tuple[Quantization | None, tuple[Ignored, ...]]:
    """Return the quantization that the keys request together, and the keys ignored because none requests it.

    The format combines all keys: `dtype` int8 with `q_groups` 64 is INT8 in 64 groups. Defaults are 8 bits, symmetric,
    integers, and a scale per output channel. (DeepSpeed does not use its default of one group: its INT8 weights have a
    scale per output channel too.)

    Raises:
        ConfigError: two keys contradict each other; names both.
    """
    stated = {path: item for path, item in given.items() if not _is_off(path, given)}
    values = {path: item.value for path, item in stated.items()}
    parts = [(item, part) for path, item in stated.items() for part in _asked(path, item)]
    by_name = _by_name(stated)
    activations = _activations(stated)
    if activations is not None and not parts and not by_name:
        if _is_false(given, "quant.weight.enabled"):
            why = "activations are quantized only with weights of 8 bits; change one of them"
            raise contradiction(activations, given["quant.weight.enabled"], why)
        parts.append((activations, INT8))
    if not parts and not by_name:
        reason = "no key asks for quantized weights; zinfer.quantization.bits does"
        return None, tuple(Ignored(path, reason) for path in _MODIFIERS if path in stated)
    if activations is not None:
        _check_activations(activations, [*by_name.values(), *parts])
    rules = [
        _rule(part, f"{item.written}.{pattern}.group_size = {part.get('group_size')}", pattern)
        for pattern, (item, part) in by_name.items()
    ]
    if parts:
        rules.append(_general_rule(parts))
    quantization = Quantization(
        tuple(rules),
        include=values.get(f"{_OWN}.include", ()),
        exclude=values.get(f"{_OWN}.exclude", ()),
        qkv=values.get("quant.qkv.enabled", True),
        search=values.get(f"{_OWN}.search", "none"),
        activations=activations is not None,
    )
    return quantization, ()


def _is_off(path: str, given: Mapping[str, Given]) -> bool:
    """Return whether a key is in a section that is switched off."""
    if path.startswith("quant."):
        if _is_false(given, "quant.enabled"):
            return True
        if path.startswith(_ACTIVATION):
            return path != f"{_ACTIVATION}enabled" and _is_false(given, f"{_ACTIVATION}enabled")
        return _is_false(given, "quant.weight.enabled")
    return path.startswith("weight_quantization.") and _is_false(given, "weight_quantization.enabled")


def _is_false(given: Mapping[str, Given], path: str) -> bool:
    return path in given and given[path].value is False


def _asked(path: str, item: Given) -> Iterator[Part]:
    """Yield the part of the general format that a key states, if any; switches only request quantization."""
    if path.startswith(_ACTIVATION):
        return
    if path == "dtype":
        if str(item.value) == "torch.int8":
            yield INT8
    elif isinstance(item.value, Part):
        yield item.value
    elif path == f"{_OWN}.include" or (path.startswith(("quant.", "weight_quant")) and path.endswith(".enabled")):
        yield from [Part()] if item.value else []


def _activations(stated: Mapping[str, Given]) -> Given | None:
    """Return the key that requests quantized activations, or None."""
    subject = "both say whether activations are quantized; keep one of them"
    own, theirs = stated.get(f"{_OWN}.activations"), stated.get(f"{_ACTIVATION}enabled")
    if own is not None and theirs is not None and own.value != theirs.value:
        raise contradiction(own, theirs, subject)
    asking = [item for item in (own, theirs) if item is not None and item.value]
    for path, item in stated.items():
        if path.startswith(_ACTIVATION) and isinstance(item.value, Part):
            if not item.value.items() <= _INT8_ACTIVATIONS.items():
                raise ConfigError(
                    f"{item}: activations are quantized to 8 bits, symmetric, with a scale a token; remove the key"
                )
            asking.append(item)
    if asking and own is not None and not own.value:
        raise contradiction(asking[0], own, subject)
    return asking[0] if asking else None


def _by_name(stated: Mapping[str, Given]) -> dict[str, _Asked]:
    """Return the format for each pattern of `post_init_quant`."""
    found: dict[str, _Asked] = {}
    for path in ("weight_quantization.post_init_quant", "quant.weight.post_init_quant"):
        if path in stated:
            for pattern, part in stated[path].value.items():
                first, known = found.setdefault(pattern, (stated[path], part))
                if known != part:
                    why = f'both say the format of "{pattern}"; keep one of them'
                    raise contradiction(first, stated[path], why)
    return found


def _general_rule(parts: Iterable[_Asked]) -> QuantRule:
    """Return the format that all keys agree on."""
    agreed: dict[str, tuple[Given, object]] = {}
    for item, part in parts:
        for name, value in part.items():
            first, known = agreed.setdefault(name, (item, value))
            if known != value:
                raise contradiction(first, item, f"both say {_SUBJECTS[name]}; keep one of them")
    origin = str(agreed["group_size"][0]) if "group_size" in agreed else ""
    return _rule({name: value for name, (_, value) in agreed.items()}, origin)


def _rule(part: Mapping[str, Any], origin: str, pattern: str | None = None) -> QuantRule:
    if part.get("group_dim") == 0 and part.get("num_groups") is not None:
        raise ConfigError(
            f"{origin} contradicts group_dim = 0: it cuts a matrix row after row, not along its columns; state "
            "group_size instead"
        )
    return QuantRule(pattern, origin=origin, **part)


def _check_activations(activations: Given, parts: Iterable[_Asked]) -> None:
    """Check the weights' format: tensor cores multiply signed bytes or FP8 and sum whole rows, so each row needs one
    scale and no zero point."""
    for item, part in parts:
        has_8_bits = part.get("bits") != 4 and part.get("symmetric") is not False
        if not has_8_bits or part.get("group_size") is not None or part.get("group_dim") == 0:
            why = "quantized activations need symmetric weights of 8 bits without group_size or group_dim 0; change one"
            raise contradiction(activations, item, why)
