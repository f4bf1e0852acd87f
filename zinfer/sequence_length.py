"""Checks, before anything is computed, that a sequence and its new tokens fit the model."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from zinfer.errors import ConfigError


def max_positions(model: nn.Module) -> int | None:
    """Tokens that the model has positions for; None where its config states no such limit."""
    config = getattr(model, "config", None)
    if config is None:
        return None
    text = config.get_text_config()
    value = getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None)
    return int(value) if value else None


def check_room(model: nn.Module, min_out_tokens: int) -> None:
    """Refuse a model without positions for the tokens that the configuration counts on.

    Raises:
        ConfigError: names both numbers.
    """
    positions = max_positions(model)
    if positions is not None and min_out_tokens > positions:
        raise ConfigError(
            f"min_out_tokens is {min_out_tokens}, but the model has positions for {positions} tokens; lower it"
        )


def check_length(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], max_out_tokens: int | None
) -> None:
    """Refuse a `generate` call whose longest row, padding not counted, has no room for its new tokens.

    Args:
        model: with transformers' ``config`` and ``generation_config``.
        args: positional arguments of the call: the ids [rows, tokens], a generation config.
        kwargs: keyword arguments of the call.
        max_out_tokens: the configuration's limit, or None.

    Raises:
        ValueError: names both numbers and the limit.
    """
    tokens = kwargs.get("input_ids", kwargs.get("inputs", args[0] if args else None))
    tokens = kwargs.get("inputs_embeds") if tokens is None else tokens
    if not isinstance(tokens, torch.Tensor):
        return
    num_input = _longest_row(tokens, kwargs.get("attention_mask"))
    config = kwargs.get("generation_config", args[1] if len(args) > 1 else None) or model.generation_config
    num_new = _num_new_tokens(config, kwargs, tokens.shape[1])
    for name, limit in (("max_out_tokens", max_out_tokens), ("the model's positions", max_positions(model))):
        if limit is not None and num_input + num_new > limit:
            raise ValueError(
                f"{num_input} input tokens and {num_new} new ones exceed {name} ({limit}); shorten the input or lower "
                f"max_new_tokens"
            )


def _longest_row(tokens: torch.Tensor, attention_mask: Any) -> int:
    """``tokens`` are ids [rows, tokens] or embeddings [rows, tokens, width]."""
    if isinstance(attention_mask, torch.Tensor) and attention_mask.shape == tokens.shape[:2]:
        return int(attention_mask.sum(dim=-1).max())
    return int(tokens.shape[1])


def _num_new_tokens(config: Any, kwargs: Mapping[str, Any], input_width: int) -> int:
    """As transformers counts: `max_new_tokens`, else what `max_length` leaves, at least 1."""
    new = kwargs.get("max_new_tokens", getattr(config, "max_new_tokens", None))
    if new is not None:
        return int(new)
    length = kwargs.get("max_length", getattr(config, "max_length", None))
    return max(1, int(length or 0) - input_width)
