"""Checks, before anything is computed, that a sequence and its new tokens fit the model."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from zinfer.errors import ConfigError, LengthError

# GenerationMixin's own, where neither max_new_tokens nor max_length is set (transformers, generation/utils.py).
_DEFAULT_NUM_NEW_TOKENS: Final = 20
_STRETCHING: Final = frozenset({"linear", "dynamic", "yarn"})


def max_positions(model: nn.Module) -> int | None:
    """Tokens that the model has positions for, an encoder-decoder's decoder; None where no such limit is stated."""
    return _positions(model, "max_decoder_position_embeddings", "max_position_embeddings", "max_target_positions")


def encoder_positions(model: nn.Module) -> int | None:
    """The same of an encoder-decoder's encoder."""
    return _positions(model, "max_encoder_position_embeddings", "max_position_embeddings")


def _positions(model: nn.Module, *names: str) -> int | None:
    config = getattr(model, "config", None)
    if not isinstance(config, PretrainedConfig):
        return None
    text = config.get_text_config()
    stated = next((value for name in names if (value := int(getattr(text, name, None) or 0)) > 0), None)  # XLNet: -1
    if stated is None and not getattr(text, "relative_attention_num_buckets", None):  # T5 states some and has none
        stated = getattr(text, "n_positions", None)
    return max(int(stated), _stretched(text, int(stated))) - _num_skipped(model) if stated else None


def _stretched(text: PretrainedConfig, stated: int) -> int:
    """Positions that rotations are scaled to (transformers, modeling_rope_utils.py).

    Linear and dynamic scaling stretch those that the config states, yarn the ones from before; where another kind is
    used the config states what it is scaled to.
    """
    rope = getattr(text, "rope_parameters", None) or {}
    kind, factor = rope.get("rope_type"), rope.get("factor")
    if kind not in _STRETCHING or not factor:
        return 0
    original = rope.get("original_max_position_embeddings") if kind == "yarn" else None
    return int((original or stated) * factor)


def _num_skipped(model: nn.Module) -> int:
    """Positions that no token has: RoBERTa counts from behind the padding token's id."""
    embeddings = getattr(getattr(model, "base_model", None), "embeddings", None)
    padding = getattr(getattr(embeddings, "position_embeddings", None), "padding_idx", None)
    return 0 if padding is None else int(padding) + 1


def most_tokens(model: nn.Module, max_out_tokens: int | None) -> int | None:
    """Tokens of a text, its prompt among them, that limits leave; None where there are none."""
    return min((limit for _, limit in _limits(model, max_out_tokens)), default=None)


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
    tokens, cache = _tokens(model, args, kwargs), kwargs.get("past_key_values")
    num_cached = 0 if cache is None else cache.get_seq_length()
    if is_encoder_decoder(model):
        decoded = _first_tensor(kwargs, "decoder_input_ids", "decoder_inputs_embeds", "labels")
        _check_pair(model, _width(tokens), num_cached + _width(decoded), max_out_tokens)
        return
    if tokens is None:
        return
    mask = kwargs.get("attention_mask")
    if _skips_padding(model) and isinstance(mask, torch.Tensor) and mask.dim() == 2 and mask.shape[1] >= _width(tokens):
        num_tokens = int(mask.sum(dim=-1).max())
    else:
        num_tokens = _width(tokens) + num_cached
    for name, limit in _limits(model, max_out_tokens):
        if num_tokens > limit:
            raise LengthError(f"{num_tokens} tokens exceed {name} ({limit}); shorten the input")


def check_length(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], max_out_tokens: int | None
) -> None:
    """Refuse a `generate` call whose longest row, padding not counted, has no room for its new tokens.

    An encoder-decoder has positions for input and output each, and padding takes some; ``max_out_tokens`` is of both.

    Args:
        model: with transformers' ``config`` and ``generation_config``.
        args: positional arguments of the call: the ids [rows, tokens], a generation config.
        kwargs: keyword arguments of the call.
        max_out_tokens: the configuration's limit, or None.

    Raises:
        LengthError: names both numbers and the limit.
    """
    tokens = _tokens(model, args, kwargs)
    config = kwargs.get("generation_config", args[1] if len(args) > 1 else None) or model.generation_config
    if is_encoder_decoder(model):
        begin = _width(_first_tensor(kwargs, "decoder_input_ids")) or 1
        num_decoded = begin + (_num_new_tokens(config, kwargs, begin) or _DEFAULT_NUM_NEW_TOKENS)
        _check_pair(model, _width(tokens), num_decoded, max_out_tokens)
        return
    if tokens is None:
        return
    num_input = _longest_row(tokens, kwargs.get("attention_mask"))
    num_new = _num_new_tokens(config, kwargs, tokens.shape[1])
    if num_new is None:  # transformers' own default stops at the positions
        num_new = max(1, min(_DEFAULT_NUM_NEW_TOKENS, (max_positions(model) or 2**31) - num_input))
    for name, limit in _limits(model, max_out_tokens):
        if num_input + num_new > limit:
            raise LengthError(
                f"{num_input} input tokens and {num_new} new ones exceed {name} ({limit}); shorten the input or lower "
                f"max_new_tokens"
            )


def _check_pair(model: nn.Module, num_input: int, num_decoded: int, max_out_tokens: int | None) -> None:
    """Tokens of an encoder's rows, none where it takes sound or pictures, and of its decoder's."""
    sums = (
        (num_input, "input tokens exceed the encoder's positions", encoder_positions(model), "shorten the input"),
        (num_decoded, "output tokens exceed the decoder's positions", max_positions(model), "lower max_new_tokens"),
        (num_input + num_decoded, "tokens of input and output exceed max_out_tokens", max_out_tokens, "raise it"),
    )
    for num_tokens, exceed, limit, remedy in sums:
        if limit is not None and num_tokens > limit:
            raise LengthError(f"{num_tokens} {exceed} ({limit}); {remedy}")


def is_encoder_decoder(model: nn.Module) -> bool:
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def _skips_padding(model: nn.Module) -> bool:
    """Whether padding takes no positions. `generate` counts without it, and so does RoBERTa."""
    return bool(_num_skipped(model)) or not isinstance(model, PreTrainedModel) or model.can_generate()


def _limits(model: nn.Module, max_out_tokens: int | None) -> Iterator[tuple[str, int]]:
    for name, limit in (("max_out_tokens", max_out_tokens), ("the model's positions", max_positions(model))):
        if limit is not None:
            yield name, limit


def _tokens(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """Ids [rows, tokens] or embeddings [rows, tokens, width] of a call; of pictures and sound none."""
    tokens = _first_tensor(kwargs, "input_ids", "inputs_embeds")
    if tokens is not None or getattr(model, "main_input_name", "input_ids") != "input_ids":
        return tokens
    first = kwargs.get("inputs", args[0] if args else None)
    return first if isinstance(first, torch.Tensor) else None


def _first_tensor(kwargs: Mapping[str, Any], *names: str) -> torch.Tensor | None:
    return next((kwargs[name] for name in names if isinstance(kwargs.get(name), torch.Tensor)), None)


def _width(tokens: torch.Tensor | None) -> int:
    return 0 if tokens is None else int(tokens.shape[1])


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
