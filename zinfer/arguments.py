"""The arguments of a call of transformers' `forward` or `generate`: on the device, and as good for a second call."""

from collections.abc import Mapping
from typing import Any, Final

import torch

# What goes on from where a first call of `generate` has left it.
_REMEMBERING: Final = frozenset(
    {"streamer", "past_key_values", "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn"}
    | {"assistant_model", "custom_generate", "generator"}
)
_NUM_POSITIONAL: Final = 2  # ids and a generation config; those that follow remember


def moved(value: Any, device: torch.device) -> Any:
    """Tensors on the device, inside the containers that transformers passes around."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: moved(item, device) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(moved(item, device) for item in value)
    return value


def can_repeat(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a second call of `generate` with the same arguments would do the same as the first."""
    return len(args) <= _NUM_POSITIONAL and not _REMEMBERING.intersection(kwargs)
