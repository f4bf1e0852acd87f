"""Checks, before anything is computed, that a sequence and its new tokens fit the model."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import nn
from transformers import PretrainedConfig

from zinfer.errors import ConfigError, LengthError

# GenerationMixin's own, where neither max_new_tokens nor max_length is set (transformers, generation/utils.py).
_DEFAULT_NUM_NEW_TOKENS: Final = 20


def max_positions(model: nn.Module) -> int | None:
    """Tokens that the model has positions for; None where its config states no such limit."""
    config = getattr(model, "config", None)
    if not isinstance(config, PretrainedConfig):
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


def check_input(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], max_out_tokens: int | None) -> None:
    """Refuse a forward call whose longest row, with what the cache holds, exceeds a limit; as `check_length`."""
    tokens = _tokens(args, kwargs)
    if tokens is None:
        return
    mask, cache = kwargs.get("attention_mask"), kwargs.get("past_key_values")
    if isinstance(mask, torch.Tensor) and mask.dim() == 2 and mask.shape[1] >= tokens.shape[1]:
        num_tokens = int(mask.sum(dim=-1).max())
    else:
        num_tokens = tokens.shape[1] + (0 if cache is None else cache.get_seq_length())
    for name, limit in _limits(model, max_out_tokens):
        if num_tokens > limit:
            raise LengthError(f"{num_tokens} tokens exceed {name} ({limit}); shorten the input")


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
        LengthError: names both numbers and the limit.
    """
    tokens = _tokens(args, kwargs)
    if tokens is None:
        return
    num_input = _longest_row(tokens, kwargs.get("attention_mask"))
    config = kwargs.get("generation_config", args[1] if len(args) > 1 else None) or model.generation_config
    num_new = _num_new_tokens(config, kwargs, tokens.shape[1])
    if num_new is None:  # transformers' own default stops at the positions
        num_new = max(1, min(_DEFAULT_NUM_NEW_TOKENS, (max_positions(model) or 2**31) - num_input))
    for name, limit in _limits(model, max_out_tokens):
        if num_input + num_new > limit:
            raise LengthError(
                f"{num_input} input tokens and {num_new} new ones exceed {name} ({limit}); shorten the input or lower "
                f"max_new_tokens"
            )


def _limits(model: nn.Module, max_out_tokens: int | None) -> Iterator[tuple[str, int]]:
    for name, limit in (("max_out_tokens", max_out_tokens), ("the model's positions", max_positions(model))):
        if limit is not None:
            yield name, limit


def _tokens(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """Ids [rows, tokens] or embeddings [rows, tokens, width] of a call."""
    tokens = kwargs.get("input_ids", kwargs.get("inputs", args[0] if args else None))
    tokens = kwargs.get("inputs_embeds") if tokens is None else tokens
    return tokens if isinstance(tokens, torch.Tensor) and tokens.dim() in (2, 3) else None


def _longest_row(tokens: torch.Tensor, attention_mask: Any) -> int:
    if isinstance(attention_mask, torch.Tensor) and attention_mask.shape == tokens.shape[:2]:
        return int(attention_mask.sum(dim=-1).max())
    return int(tokens.shape[1])


def _num_new_tokens(config: Any, kwargs: Mapping[str, Any], input_width: int) -> int | None:
    """As transformers counts: `max_new_tokens`, else what `max_length` leaves; None where neither is set."""
    new = kwargs.get("max_new_tokens", getattr(config, "max_new_tokens", None))
    if new is not None:
        return int(new)
    length = kwargs.get("max_length", getattr(config, "max_length", None))
    return None if length is None else max(1, int(length) - input_width)
