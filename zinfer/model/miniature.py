"""Miniatures of a model: a few of its layers with random weights, in which what its code does can be measured.

[Note: what a miniature keeps]
All options of the config, and a layer of every kind with one more behind them. Widths and counts of heads and experts
become small, so that a measurement takes a second; whether there are as many keys as queries, one, or a number between
stays. Where a class does not suit that, its own widths stay: matrices are then windows into a short random buffer, so
they take no memory.

Windows, chunks and numbers of keys that an index chooses become a few tokens, so that short rows exceed them.
"""

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, Protocol

import torch
from torch import nn
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedConfig, PreTrainedModel

from zinfer.errors import ConfigError
from zinfer.model.build import build_on_meta
from zinfer.model.context_length import is_encoder_decoder
from zinfer.model.partition import find_layers
from zinfer.model.stage import ShorterModel, count_to_all_kinds, lists_by_layer

_WINDOW: Final = 4
"""Attention windows and chunks in the measurement, so that its rows exceed them."""
_NARROWED: Final = re.compile(
    r"(window|chunk|index_topk|index_block|floor|local_attention)(?!.*(layer|pattern|type|num))"
)
"""Members of configs, and of modules, that are a number of tokens from which on attention or positions change."""
GROWING_ROTARY: Final = frozenset({"dynamic", "longrope"})
"""Rotary types whose frequencies depend on the longest sequence (transformers, modeling_rope_utils.py)."""
_BLOCKS: Final = "index_topk_blocks"
"""Blocks of `index_block_size` keys that an index chooses."""
_ORIGINAL: Final = "original_max_position_embeddings"
FORCED: Final = 7
"""The token that all rows are continued with."""
_MAX_WEIGHTS: Final = 2_000_000_000
"""Of a miniature; those of embeddings and unused experts take no time."""
NUM_TOKENS: Final = 64
"""Tokens that the head is left with."""
TOLERANCE: Final = 1e-3
"""Of the outputs' standard deviation; rounding makes about 1e-6, another position 0.1 or more."""
_STEPS: Final = (1, 7, 13, 29)
"""Distances in the random buffer of a matrix's neighbours, from the last dimension to the first."""


_WIDTHS: Final[Mapping[str, int]] = {
    name: width
    for width, names in (
        (
            64,
            "hidden_size n_embd d_model dim emb_dim embed_dim hidden_dim embedding_size word_embed_proj_dim "
            "input_embedding_size output_embedding_size lru_width",
        ),
        (
            96,
            "intermediate_size ffn_dim n_inner ffn_hidden_size d_ff dff dim_ff d_inner decoder_ffn_dim encoder_ffn_dim "
            "dense_intermediate_size intermediate_size_mlp",
        ),
        (
            32,
            "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size "
            "moe_shared_expert_intermediate_size expert_ffn_hidden_size shared_experts_intermediate_size "
            "hidden_size_per_layer_input router_hidden_size",
        ),
        (
            4,
            "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads "
            "attention_heads index_n_heads swa_num_attention_heads",
        ),
        (16, "head_dim swa_head_dim kv_channels d_kv index_head_dim qk_nope_head_dim kv_lora_rank"),
        (8, "qk_rope_head_dim rotary_dim num_experts num_local_experts n_routed_experts moe_num_experts"),
        (12, "v_head_dim"),
        (24, "qk_head_dim q_lora_rank"),
        (2, "num_experts_per_tok moe_topk moe_k moe_top_k zero_expert_num n_shared_experts num_shared_experts n_group"),
        (1, "topk_group"),
        (128, "vocab_size vocab_size_per_layer_input max_position_embeddings n_positions max_seq_len"),
    )
    for name in names.split()
}
"""What sizes become that are larger."""
_KEY_HEADS: Final = ("num_key_value_heads", "num_kv_heads", "kv_n_heads", "swa_num_key_value_heads")
_ROTARY_LISTS: Final = ("short_factor", "long_factor")


class Miniature(Protocol):
    """Makes a miniature of a model, which is not changed.

    Args:
        narrows: whether windows and the like are a few tokens wide.
    """

    def __call__(self, model: PreTrainedModel, *, narrows: bool = True) -> PreTrainedModel: ...


def _first_layers(model: PreTrainedModel, *, narrows: bool = True, shrinks: bool = False) -> PreTrainedModel:
    """Make one whose config states the number of its layers.

    In outputs of the last token alone the layer behind shows what a layer makes of earlier tokens.
    """
    small = _rebuilt(model, narrows, shrinks)
    ShorterModel.of_each_kind(small, num_more=1).apply()
    return _with_random_weights(small)


def _shorter_lists(model: PreTrainedModel, *, narrows: bool = True, shrinks: bool = False) -> PreTrainedModel:
    """Make one of each list of layers; only the number of a decoder's is stated."""
    small = _rebuilt(model, narrows, shrinks)
    text: Any = small.config.get_text_config(decoder=True)
    lists: dict[str, dict[str, nn.Module]] = {}
    for name, layer in find_layers(small).items():
        lists.setdefault(name.rpartition(".")[0], {})[name] = layer
    for path, layers in lists.items():
        if isinstance(found := small.get_submodule(path), nn.ModuleList) and len(found) == len(layers):
            del found[count_to_all_kinds(small, layers) + 1 :]
            if len(layers) == getattr(text, "num_hidden_layers", None):
                for name, values in list(lists_by_layer(text, len(layers))):
                    setattr(text, name, values[: len(found)])
                text.num_hidden_layers = len(found)
    return _with_random_weights(small)


MINIATURES: Final[tuple[Miniature, ...]] = (
    partial(_first_layers, shrinks=True),
    partial(_shorter_lists, shrinks=True),
    _first_layers,
    _shorter_lists,
)
"""From the fastest, which suits the fewest classes, to the one that suits most; what does not suit one raises."""


def _rebuilt(model: PreTrainedModel, narrows: bool, shrinks: bool) -> PreTrainedModel:
    """Build the class again on the meta device, so that its modules read the changed config."""
    config = copy.deepcopy(model.config)
    text: Any = config.get_text_config()
    if narrows:
        _narrow_windows(text)
    if shrinks:
        shrink(config)
    if getattr(text, "_experts_implementation", None) is not None:
        text._experts_implementation = "eager"  # the others copy the weights of all experts
    return build_on_meta(type(model), config)


def shrink(config: Any) -> None:
    """Let a config state small sizes, and all else as before."""
    own = dict(vars(config))
    num_heads = max((own.get(name) or 0 for name in ("num_attention_heads", "n_heads", "n_head")), default=0)
    for name, size in own.items():
        if isinstance(size, PreTrainedConfig):
            shrink(size)
        elif name == "rope_parameters":
            _shorten_lists(size, own)
        elif not isinstance(size, int) or isinstance(size, bool):
            continue
        elif name in _KEY_HEADS and size > 1:
            setattr(config, name, 4 if size == num_heads else 2)
        elif name == "head_dim" and size == own.get("qk_rope_head_dim"):  # of the rotated part alone
            config.head_dim = min(size, _WIDTHS["qk_rope_head_dim"])
        elif size > _WIDTHS.get(name, size):
            setattr(config, name, _WIDTHS[name])
        elif name.endswith("_token_id") and size >= _WIDTHS["vocab_size"]:
            setattr(config, name, 0)


def _shorten_lists(parameters: object, own: Mapping[str, Any]) -> None:
    """Leave as many of a rotation's factors as a head has angles."""
    for each in _rotary_kinds(parameters):
        share = each.get("partial_rotary_factor") or own.get("partial_rotary_factor") or 1.0
        for name in _ROTARY_LISTS:
            if isinstance(each, dict) and isinstance(factors := each.get(name), list):
                each[name] = factors[: int(16 * share) // 2]


def narrowed_sizes(config: Any) -> dict[str, int]:
    """Return, by their names in a config, the numbers of tokens from which on attention or positions may change."""
    found = {name: size for name, size in vars(config).items() if _NARROWED.search(name) and _exceeds_window(size)}
    for each in _rotary_kinds(getattr(config, "rope_parameters", None)):
        if each["rope_type"] not in GROWING_ROTARY and _exceeds_window(size := each.get(_ORIGINAL)):
            found[f"rope_parameters.{_ORIGINAL}"] = size
    found.pop(_BLOCKS, None)
    if "index_block_size" in found:
        found["index_block_size"] *= getattr(config, _BLOCKS, 1)
    return found


def _exceeds_window(size: object) -> bool:
    return isinstance(size, int) and not isinstance(size, bool) and size > _WINDOW


def _narrow_windows(text: Any) -> None:
    """Let windows of a text config be exceeded by rows of a few tokens."""
    for name, size in list(vars(text).items()):
        if _NARROWED.search(name) and _exceeds_window(size):
            setattr(text, name, _WINDOW)
    if hasattr(text, _BLOCKS):
        setattr(text, _BLOCKS, 1)
    for each in _rotary_kinds(getattr(text, "rope_parameters", None)):
        if each["rope_type"] not in GROWING_ROTARY and isinstance(each, dict) and _ORIGINAL in each:
            each[_ORIGINAL] = min(each[_ORIGINAL], _WINDOW)


def rotary_border(config: PreTrainedConfig) -> tuple[int | None, bool]:
    """Return the tokens up to which frequencies stay, and whether longer rows have frequencies of their length."""
    text: Any = config.get_text_config()
    parameters = getattr(text, "rope_parameters", None)
    borders, grows = [], False
    for each in _rotary_kinds(parameters):
        if each["rope_type"] == "longrope":
            own = each.get("original_max_position_embeddings")
            borders.append(int(own or getattr(text, "original_max_position_embeddings", text.max_position_embeddings)))
        elif each["rope_type"] == "dynamic":
            borders.append(int(text.max_position_embeddings))
            grows = True
    return min(borders, default=None), grows or len(set(borders)) > 1


def _rotary_kinds(parameters: object) -> Iterator[Mapping[str, Any]]:
    if isinstance(parameters, Mapping):
        if "rope_type" in parameters:
            yield parameters
        for each in parameters.values():
            yield from _rotary_kinds(each)


def _with_random_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Give a model random float32 weights and few logits.

    Raises:
        ConfigError: it has so many that a measurement would take minutes.
    """
    if (num_weights := sum(each.numel() for each in model.parameters())) > _MAX_WEIGHTS:
        raise ConfigError(f"{num_weights:,} weights are too many")
    generator = torch.Generator().manual_seed(0)
    head = model.get_output_embeddings()
    filled: dict[int, nn.Parameter] = {}  # tied ones stay tied
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in filled:
                    values = _random(tuple(parameter.shape), generator, is_scale=name.endswith("weight"))
                    filled[id(parameter)] = nn.Parameter(values, requires_grad=False)
                module._parameters[name] = filled[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                values = torch.zeros(buffer.shape, dtype=buffer.dtype) if buffer.is_meta else buffer
                module._buffers[name] = values.float() if buffer.is_floating_point() else values
    if isinstance(head, nn.Linear):  # few logits tell as much as all
        for name, buffer in model._buffers.items():
            if buffer is not None and buffer.shape[-1:] == (head.out_features,):  # BART's final_logits_bias
                model._buffers[name] = buffer[..., :NUM_TOKENS]
        for name, parameter in head._parameters.items():
            if parameter is not None:
                head._parameters[name] = nn.Parameter(parameter[:NUM_TOKENS], requires_grad=False)
        head.out_features = min(NUM_TOKENS, head.out_features)
    return model


def _random(shape: tuple[int, ...], generator: torch.Generator, *, is_scale: bool) -> torch.Tensor:
    """Return a window of this shape into a short random buffer; of a vector, numbers around 1 if it is a scale."""
    if len(shape) < 2:
        return 0.1 * torch.randn(shape, generator=generator) + (1 if is_scale else 0)
    steps = [_STEPS[min(place, len(_STEPS) - 1)] for place in range(len(shape))][::-1]
    num_values = 1 + sum((size - 1) * step for size, step in zip(shape, steps, strict=True) if size)
    values = torch.randn(max(num_values, 1), generator=generator) * min(0.3, 2 / max(shape[-1], 1) ** 0.5)
    found: torch.Tensor = values.as_strided(shape, steps)
    return found


def padded_inputs(rows: Sequence[Sequence[int]], pad_token_id: int, side: str) -> dict[str, torch.Tensor]:
    longest = max(map(len, rows))
    ids = torch.full((len(rows), longest), pad_token_id)
    mask = torch.zeros((len(rows), longest), dtype=torch.long)
    for number, row in enumerate(rows):
        place = slice(longest - len(row), None) if side == "left" else slice(len(row))
        ids[number, place], mask[number, place] = torch.tensor(row), 1
    return {"input_ids": ids, "attention_mask": mask}


class _Forced(LogitsProcessor):  # type: ignore[misc]
    """Continues all rows with the same tokens."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(scores, -torch.inf)
        forced[:, FORCED] = 0
        return forced


def generate_forced(
    model: PreTrainedModel, rows: Sequence[Sequence[int]], pad_token_id: int, num_new: int = 2
) -> torch.Tensor:
    """Return the first row's logits for its first new tokens, [new tokens, logits]."""
    side = "right" if is_encoder_decoder(model) else "left"
    found: Any = model.generate(
        **padded_inputs(rows, pad_token_id, side),
        logits_processor=LogitsProcessorList([_Forced()]),
        max_new_tokens=num_new,
        eos_token_id=[NUM_TOKENS],
        pad_token_id=pad_token_id,
        do_sample=False,
        num_beams=1,
        forced_eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return torch.stack([logits[0].float() for logits in found.logits])
