"""Determines how many positions a model has, and refuses calls that would exceed them, before any compute."""

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from zinfer.errors import LengthError
from zinfer.requests import length_limits
from zinfer.requests.length_limits import LengthLimits

# GenerationMixin's default if neither max_new_tokens nor max_length is set (transformers, generation/utils.py).
_DEFAULT_NUM_NEW_TOKENS: Final = 20
_STRETCHING: Final = frozenset({"linear", "dynamic", "yarn"})


def max_positions(model: nn.Module) -> int | None:
    """Return the number of positions of the model, or of an encoder-decoder's decoder; None if there is no limit."""
    return _positions(model, "max_decoder_position_embeddings", "max_position_embeddings", "max_target_positions")


def encoder_positions(model: nn.Module) -> int | None:
    """Return the number of positions of an encoder-decoder's encoder; None if there is no limit."""
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
    """Return the positions after rotary scaling (transformers, modeling_rope_utils.py); 0 if they are not scaled.

    Linear and dynamic scaling multiply the config's positions, yarn the original ones; with other kinds the config
    states the scaled number.
    """
    rope = getattr(text, "rope_parameters", None) or {}
    kind, factor = rope.get("rope_type"), rope.get("factor")
    if kind not in _STRETCHING or not factor:
        return 0
    original = rope.get("original_max_position_embeddings") if kind == "yarn" else None
    return int((original or stated) * factor)


def _num_skipped(model: nn.Module) -> int:
    """Return the number of positions that are not used: RoBERTa counts from the padding token's id + 1."""
    embeddings = getattr(getattr(model, "base_model", None), "embeddings", None)
    padding = getattr(getattr(embeddings, "position_embeddings", None), "padding_idx", None)
    return 0 if padding is None else int(padding) + 1


def read_limits(model: nn.Module, max_out_tokens: int | None, *, generates: bool = True) -> LengthLimits:
    """Read the limits of a model's requests.

    Args:
        max_out_tokens: the configuration's own limit, or None.
        generates: whether tokens are generated.
    """
    if not is_encoder_decoder(model):
        positions = max_positions(model)
        if generates:
            return LengthLimits.of_decoder(positions, max_out_tokens)
        return LengthLimits.of_encoder(positions, "the model's positions", max_out_tokens)
    if generates:
        return LengthLimits.of_encoder_decoder(encoder_positions(model), max_positions(model), max_out_tokens)
    return LengthLimits.of_encoder(encoder_positions(model), "the encoder's positions", max_out_tokens)


def check_min_out_tokens(model: nn.Module, min_out_tokens: int) -> None:
    """Raise ConfigError if the model has fewer positions than ``min_out_tokens``."""
    length_limits.check_min_out_tokens(max_positions(model), min_out_tokens)


def check_forward(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], max_out_tokens: int | None
) -> None:
    """Refuse a forward call whose longest row, with cached tokens, exceeds a limit; otherwise as `check_generate`."""
    tokens, cache = _tokens(model, args, kwargs), kwargs.get("past_key_values")
    num_tokens, num_decoded = _width(tokens), 0
    num_cached = 0 if cache is None else cache.get_seq_length()
    if is_encoder_decoder(model):
        decoded = _first_tensor(kwargs, "decoder_input_ids", "decoder_inputs_embeds", "labels")
        num_decoded = max(0, num_cached + _width(decoded) - 1)
    elif tokens is not None:
        mask = kwargs.get("attention_mask")
        is_mask = isinstance(mask, torch.Tensor) and mask.dim() == 2 and mask.shape[1] >= num_tokens
        if mask is not None and is_mask and _skips_padding(model):
            num_tokens = int(mask.sum(dim=-1).max())
        else:
            num_tokens += num_cached
    _check(model, num_tokens, num_decoded, max_out_tokens)


def check_generate(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], max_out_tokens: int | None
) -> None:
    """Refuse a `generate` call whose longest row, padding not counted, has no room for its new tokens.

    An encoder-decoder has separate positions for input and output, and padding takes positions; ``max_out_tokens``
    limits their sum.

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
        num_new = begin - 1 + (_num_new_tokens(config, kwargs, begin) or _DEFAULT_NUM_NEW_TOKENS)
        _check(model, _width(tokens), num_new, max_out_tokens)
    elif tokens is not None:
        num_input = _longest_row(tokens, kwargs.get("attention_mask"))
        stated = _num_new_tokens(config, kwargs, tokens.shape[1])
        # transformers' own default stops at the positions.
        usual = max(1, min(_DEFAULT_NUM_NEW_TOKENS, (max_positions(model) or 2**31) - num_input))
        _check(model, num_input, usual if stated is None else stated, max_out_tokens)


def _check(model: nn.Module, num_input: int, num_new: int, max_out_tokens: int | None) -> None:
    if problem := read_limits(model, max_out_tokens).problem(num_input, num_new, "the input"):
        raise LengthError(problem)


def is_encoder_decoder(model: nn.Module) -> bool:
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def _skips_padding(model: nn.Module) -> bool:
    """Whether padding takes no positions, as in `generate` and in RoBERTa."""
    return bool(_num_skipped(model)) or not isinstance(model, PreTrainedModel) or model.can_generate()


def _tokens(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """Return a call's ids [rows, tokens] or embeddings [rows, tokens, width]; None for images and audio."""
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
    """Return `max_new_tokens`, else `max_length` minus the input, as transformers does; None if neither is set."""
    new = kwargs.get("max_new_tokens", getattr(config, "max_new_tokens", None))
    if new is not None:
        return int(new)
    length = kwargs.get("max_length", getattr(config, "max_length", None))
    return None if length is None else max(1, int(length) - input_width)
