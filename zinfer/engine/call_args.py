"""Arguments of transformers' `forward` and `generate`: moves them to the device, and checks what they ask for."""

from collections.abc import Mapping, MutableMapping
from copy import copy
from typing import Any, Final

import torch

# Arguments that keep state from one call of `generate` to the next.
_REMEMBERING: Final = frozenset(
    {"streamer", "past_key_values", "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn"}
    | {"assistant_model", "custom_generate", "generator"}
)
_NUM_POSITIONAL: Final = 2  # ids and a generation config; the arguments after them keep state


def moved(value: Any, device: torch.device) -> Any:
    """Return the value with its tensors on the device, also those in mappings, lists and tuples (same classes).

    A container without tensors of another device is not copied: the call may write into its arguments.
    """
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        changed = {key: new for key, old in value.items() if (new := moved(old, device)) is not old}
        return _with_items(value, changed) if changed else value
    if isinstance(value, tuple | list):
        items = [moved(item, device) for item in value]
        is_same = all(new is old for new, old in zip(items, value, strict=True))
        return value if is_same else _with_elements(value, items)
    return value


def _with_items(value: Mapping[Any, Any], changed: Mapping[Any, Any]) -> Mapping[Any, Any]:
    if not isinstance(value, MutableMapping):
        return {**value, **changed}
    other = copy(value)  # a ModelOutput holds its items as attributes too: setting one sets both
    for key, item in changed.items():
        other[key] = item
    return other


def _with_elements(value: tuple[Any, ...] | list[Any], items: list[Any]) -> tuple[Any, ...] | list[Any]:
    if isinstance(value, list):
        other = copy(value)
        other[:] = items
        return other
    make = getattr(type(value), "_make", type(value))  # a namedtuple takes its fields one by one
    made: tuple[Any, ...] = make(items)
    return made


def can_repeat(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a second call of `generate` with the same arguments would repeat the first."""
    return len(args) <= _NUM_POSITIONAL and not _REMEMBERING.intersection(kwargs)


def looks_at_logits(kwargs: Mapping[str, Any], config: Any) -> bool:
    """Whether NaN logits should stop a `generate` call.

    They should not if `remove_invalid_values` or a logits processor handles them.

    Args:
        kwargs: of the call.
        config: the generation config passed by position, or the model's own.
    """
    config = kwargs.get("generation_config") or config

    def asked(name: str) -> bool:
        return bool(kwargs.get(name, getattr(config, name, False)))

    return not asked("remove_invalid_values") and (asked("do_sample") or not kwargs.get("logits_processor"))
