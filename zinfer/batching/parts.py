"""Computes a pass part by part inside each layer, so that one load of its weights and pages serves all parts.

Activations inside a layer are as large as a part; only the residual stream is as long as the pass.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from zinfer.batching.attention import PagedAttention
from zinfer.batching.ragged import Part
from zinfer.kv_cache.base import PageCache
from zinfer.model.module_patches import ModulePatches


class PartedLayers:
    """Wraps the forward of a model's layers.

    Args:
        patches: records the wrappers, to undo them.
        layers: the modules; each takes the hidden states [1, tokens, hidden] first.
        attention: the layers' attention.
        cache: fetches each layer's pages while it computes.
    """

    def __init__(
        self, patches: ModulePatches, layers: Sequence[nn.Module], attention: PagedAttention, cache: PageCache
    ) -> None:
        self._attention = attention
        self._cache = cache
        self._parts: Sequence[Part] = ()
        for number, layer in enumerate(layers):
            patches.patch(layer, self._by_parts(number, layer.forward))

    def set(self, parts: Sequence[Part]) -> None:
        """Set the parts of the next pass."""
        self._parts = parts

    def _by_parts(self, number: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def by_parts(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self._cache.fetch_layer(number)
            found = []
            for part in self._parts:
                with self._attention.over(part):
                    sliced = [_slice(value, part.tokens, hidden.shape[1]) for value in args]
                    named = {name: _slice(value, part.tokens, hidden.shape[1]) for name, value in kwargs.items()}
                    found.append(forward(hidden[:, part.tokens], *sliced, **named))
            self._cache.release_layer(number)
            return _joined(found)

        return by_parts


def _slice(value: Any, tokens: slice, num_tokens: int) -> Any:
    """Slice a value with one entry per token, such as positions, rotary cosines and sines, for a part."""
    if isinstance(value, torch.Tensor):
        return value[:, tokens] if value.dim() > 1 and value.shape[1] == num_tokens else value
    if isinstance(value, tuple):
        return tuple(_slice(item, tokens, num_tokens) for item in value)
    return value


def _joined(found: Sequence[Any]) -> Any:
    """Join the outputs of the parts into the layer's output."""
    if len(found) == 1:
        return found[0]
    if isinstance(found[0], torch.Tensor):
        return torch.cat(list(found), dim=1)
    if isinstance(found[0], tuple):
        return tuple(_joined(items) for items in zip(*found, strict=True))
    return found[0]
