"""Which rows may share a padded batch, so that each gets what it gets alone.

[Note: what padding may change]
A mask hides padding from attention, but positions may count its columns (BART's decoder), recurrent layers may read it
(RWKV), and layers without attention may mix it in (FNet). Whether a class does, with its options, is measured: on its
first layers with random float32 weights, one row is computed alone and beside others, before the model is loaded.
Models are those of `zinfer.model.miniature`.

Rotary frequencies that depend on the longest row of a batch ("longrope", "dynamic") change at a length too great to
measure; that length is read from the config.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from zinfer.errors import ConfigError
from zinfer.model.context_length import is_encoder_decoder
from zinfer.model.miniature import (
    MINIATURES,
    NUM_TOKENS,
    TOLERANCE,
    generate_forced,
    padded_inputs,
    rotary_border,
)

_T = TypeVar("_T")
_ROW: Final = 5
_LONG_ROW: Final = 14


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
    for make in MINIATURES:
        try:
            sharing, why = _measured(make(model), pad_token_id, generates=generates), None
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


@torch.no_grad()
def _measured(model: PreTrainedModel, pad_token_id: int, *, generates: bool) -> Sharing:
    tokens = [each for each in range(3, NUM_TOKENS) if each != pad_token_id]
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


def _encoded(model: PreTrainedModel, rows: Sequence[Sequence[int]], pad_token_id: int) -> torch.Tensor:
    """Return the first row's hidden states [tokens, width], as jobs compute them."""
    encoder: Any = model.get_encoder() if is_encoder_decoder(model) else model.base_model
    hidden: torch.Tensor = encoder(**padded_inputs(rows, pad_token_id, "right")).last_hidden_state
    return hidden[0, : len(rows[0])].float()
