"""Which rows may share a padded batch, so that each gets what it gets alone.

[Note: what padding may change]
A mask hides padding from attention, but positions may count its columns (BART's decoder), recurrent layers may read it
(RWKV), and layers without attention may mix it in (FNet). Whether a class does, with its options, is measured: on its
first layers with random float32 weights, one row is computed alone and beside others, before the model is loaded.
Matrices are windows into a short random buffer, so they take no memory and keep the widths of the config.

Rotary frequencies that depend on the longest row of a batch ("longrope", "dynamic") change at a length too great to
measure; that length is read from the config.
"""

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, Protocol, TypeVar

import torch
from torch import nn
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedConfig, PreTrainedModel

from zinfer.errors import ConfigError
from zinfer.model.build import build_on_meta
from zinfer.model.context_length import is_encoder_decoder
from zinfer.model.partition import find_layers
from zinfer.model.stage import ShorterModel, count_to_all_kinds

_T = TypeVar("_T")
_ROW: Final = 5
_LONG_ROW: Final = 14
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
_NUM_NEW: Final = 2
FORCED: Final = 7
"""The token that all rows are continued with."""
_NUM_TOKENS: Final = 64
"""Tokens that the head is left with."""
TOLERANCE: Final = 1e-3
"""Of the outputs' standard deviation; rounding makes about 1e-6, another position 0.1 or more."""
_STEPS: Final = (1, 7, 13, 29)
"""Distances in the random buffer of a matrix's neighbours, from the last dimension to the first."""


class Sharing(IntEnum):
    """Which rows may share a batch: each is alone, rows of equal lengths, or all."""

    ALONE = 0
    EQUAL = 1
    ANY = 2


@dataclass(frozen=True)
class RowSharing:
    """Divides rows into groups that may share padded batches.

    Attributes:
        sharing: of rows within `border`.
        why: a sentence on what is divided, and why; None: nothing is.
        border: tokens of a row, new ones included, up to which rotary frequencies stay as they are; None: they always
            do.
        grows: whether frequencies past the border depend on the exact length.
    """

    sharing: Sharing = Sharing.ANY
    why: str | None = None
    border: int | None = None
    grows: bool = False

    def groups(
        self, rows: Sequence[_T], length: Callable[[_T], int], num_new: Callable[[_T], int] = lambda row: 0
    ) -> list[tuple[list[_T], int | None]]:
        """Return groups of rows, in the rows' order, each with the most tokens that its batches may reach.

        Args:
            length: of a row, in tokens.
            num_new: tokens generated after it, at most.
        """
        found: dict[tuple[object, ...], list[_T]] = {}
        for number, row in enumerate(rows):
            own = {Sharing.ANY: 0, Sharing.EQUAL: length(row), Sharing.ALONE: number}[self.sharing]
            found.setdefault((own, self._side(length(row), num_new(row))), []).append(row)
        return [(group, self.border if side == "within" else None) for (_, side), group in found.items()]

    def _side(self, num_tokens: int, num_new: int) -> object:
        if self.border is None:
            return None
        if num_tokens + num_new <= self.border:
            return "within"
        return "past" if num_tokens > self.border and not self.grows else num_tokens


def find_row_sharing(model: PreTrainedModel, pad_token_id: int, *, generates: bool) -> RowSharing:
    """Measure which rows of a model may share padded batches.

    Args:
        model: on the meta device; not changed.
        pad_token_id: that rows are padded with: on the left for decoders that generate, else on the right.
        generates: whether rows are generated, or only encoded.
    """
    border, grows = rotary_border(model.config)
    name = type(model).__name__
    sharing, why = Sharing.EQUAL, None
    for make_copy in RANDOM_COPIES:
        try:
            sharing, why = _measured(make_copy(model), pad_token_id, generates=generates), None
            break
        except Exception as error:  # a class that such a copy does not suit may fail in any way
            why = f"how padding affects a {name} could not be measured ({type(error).__name__}: {error!s:.100})"
    if why is None and sharing is not Sharing.ANY:
        why = f"padding changes the outputs of a {name}, whose positions or layers count it"
    if why is not None:
        together = "rows of equal lengths share batches" if sharing is Sharing.EQUAL else "each row is computed alone"
        why = f"{why}: {together}, which takes more passes"
    elif border is not None:
        past = "those past it share batches only with rows of their length" if grows else "those past it are apart"
        why = f"rotary frequencies change past {border} tokens: rows that stay within share batches, and {past}"
    return RowSharing(sharing, why, border, grows)


def reset_rotary(model: nn.Module) -> None:
    """Make dynamic rotary embeddings forget the lengths of earlier batches, as in a model that was just loaded."""
    for module in model.modules():
        known = [name for name in vars(module) if name.endswith("max_seq_len_cached")]
        if not known or not isinstance(usual := vars(module).get("original_max_seq_len"), int):
            continue
        for name in known:
            setattr(module, name, usual)
        for name, buffer in list(module._buffers.items()):
            if name.endswith("original_inv_freq") and buffer is not None:
                module.register_buffer(name.replace("original_", ""), buffer.clone(), persistent=False)


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


def first_layers(model: PreTrainedModel, *, narrows: bool = True) -> PreTrainedModel:
    """Return a model of the same config with random weights: the first layers that have all kinds, and one more.

    In outputs of the last token alone the layer behind shows what a layer makes of earlier tokens. The returned model's
    config states the number of its layers.

    Args:
        model: not changed.
        narrows: whether attention windows and the like are a few tokens wide, so that short rows exceed them.
    """
    small = _rebuilt(model, narrows)
    ShorterModel.of_each_kind(small, num_more=1).apply()
    return _with_random_weights(small)


def _shorter_lists(model: PreTrainedModel, *, narrows: bool = True) -> PreTrainedModel:
    """As `first_layers`, of each list of layers; the config states the number of all."""
    small = _rebuilt(model, narrows)
    lists: dict[str, dict[str, nn.Module]] = {}
    for name, layer in find_layers(small).items():
        lists.setdefault(name.rpartition(".")[0], {})[name] = layer
    for path, layers in lists.items():
        if isinstance(found := small.get_submodule(path), nn.ModuleList) and len(found) == len(layers):
            del found[count_to_all_kinds(small, layers) + 1 :]
    return _with_random_weights(small)


def _rebuilt(model: PreTrainedModel, narrows: bool) -> PreTrainedModel:
    """Build the class again on the meta device, so that its modules read the narrowed config too."""
    config = copy.deepcopy(model.config)
    if narrows:
        _narrow_windows(config)
    text: Any = config.get_text_config()
    if getattr(text, "_experts_implementation", None) is not None:
        text._experts_implementation = "eager"  # the others copy the weights of all experts
    return build_on_meta(type(model), config)


class RandomCopy(Protocol):
    """Makes a short model with random weights of another one's config; as `first_layers`."""

    def __call__(self, model: PreTrainedModel, *, narrows: bool = True) -> PreTrainedModel: ...


RANDOM_COPIES: Final[tuple[RandomCopy, ...]] = (first_layers, _shorter_lists)
"""The config of the first one's result is true, the second one suits more classes."""


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


def _narrow_windows(config: PreTrainedConfig) -> None:
    """Let windows be exceeded by rows of a few tokens."""
    text: Any = config.get_text_config()
    for name, size in list(vars(text).items()):
        if _NARROWED.search(name) and _exceeds_window(size):
            setattr(text, name, _WINDOW)
    if hasattr(text, _BLOCKS):
        setattr(text, _BLOCKS, 1)
    for each in _rotary_kinds(getattr(text, "rope_parameters", None)):
        if each["rope_type"] not in GROWING_ROTARY and isinstance(each, dict) and _ORIGINAL in each:
            each[_ORIGINAL] = min(each[_ORIGINAL], _WINDOW)


def _with_random_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Give a model random float32 weights and few logits."""
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
                model._buffers[name] = buffer[..., :_NUM_TOKENS]
        for name, parameter in head._parameters.items():
            if parameter is not None:
                head._parameters[name] = nn.Parameter(parameter[:_NUM_TOKENS], requires_grad=False)
        head.out_features = min(_NUM_TOKENS, head.out_features)
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


@torch.no_grad()
def _measured(model: PreTrainedModel, pad_token_id: int, *, generates: bool) -> Sharing:
    tokens = [each for each in range(3, _NUM_TOKENS) if each != pad_token_id]
    row, other, longer = (tokens[begin : begin + num] for begin, num in ((0, _ROW), (9, _ROW), (20, _LONG_ROW)))
    compute = generate_forced if generates else _encoded

    def is_kept(neighbour: Sequence[int]) -> bool:
        found = compute(model, [row, neighbour], pad_token_id)
        return bool((found - alone).abs().max() <= TOLERANCE * alone.std())

    alone = compute(model, [row], pad_token_id)
    if not alone.isfinite().all():
        raise ConfigError("its outputs with random weights are not finite")
    if is_kept(longer):
        return Sharing.ANY
    return Sharing.EQUAL if is_kept(other) else Sharing.ALONE


def _padded(rows: Sequence[Sequence[int]], pad_token_id: int, side: str) -> dict[str, torch.Tensor]:
    longest = max(map(len, rows))
    ids = torch.full((len(rows), longest), pad_token_id)
    mask = torch.zeros((len(rows), longest), dtype=torch.long)
    for number, row in enumerate(rows):
        place = slice(longest - len(row), None) if side == "left" else slice(len(row))
        ids[number, place], mask[number, place] = torch.tensor(row), 1
    return {"input_ids": ids, "attention_mask": mask}


def _encoded(model: PreTrainedModel, rows: Sequence[Sequence[int]], pad_token_id: int) -> torch.Tensor:
    """Return the first row's hidden states [tokens, width], as jobs compute them."""
    encoder: Any = model.get_encoder() if is_encoder_decoder(model) else model.base_model
    hidden: torch.Tensor = encoder(**_padded(rows, pad_token_id, "right")).last_hidden_state
    return hidden[0, : len(rows[0])].float()


class _Forced(LogitsProcessor):  # type: ignore[misc]
    """Continues all rows with the same tokens."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(scores, -torch.inf)
        forced[:, FORCED] = 0
        return forced


def generate_forced(
    model: PreTrainedModel, rows: Sequence[Sequence[int]], pad_token_id: int, num_new: int = _NUM_NEW
) -> torch.Tensor:
    """Return the first row's logits for its first new tokens, [new tokens, logits]."""
    side = "right" if is_encoder_decoder(model) else "left"
    found: Any = model.generate(
        **_padded(rows, pad_token_id, side),
        logits_processor=LogitsProcessorList([_Forced()]),
        max_new_tokens=num_new,
        eos_token_id=[_NUM_TOKENS],
        pad_token_id=pad_token_id,
        do_sample=False,
        num_beams=1,
        forced_eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return torch.stack([logits[0].float() for logits in found.logits])
