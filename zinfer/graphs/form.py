"""The form of a call: everything except its tensors' values. Calls of one form can replay the same graph."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.utils import _pytree as pytree
from transformers.cache_utils import Cache, EncoderDecoderCache, StaticCache, StaticLayer

from zinfer.graphs.masks import Padding, padding_of
from zinfer.graphs.static_layer import FusedStaticLayer

CONSTANTS: Final = (bool, int, float, str, type(None), torch.dtype, torch.device)

_MOST_TOKENS: Final = 4096
"""Above this, a forward computes for longer than Python takes to launch it, and a graph would keep its activations."""
_KNOWN: Final = (StaticLayer, FusedStaticLayer)


class CannotCapture(Exception):
    """A call that no graph can replay; the message says why."""


@dataclass(frozen=True)
class Call:
    """A call's arguments, flattened.

    Attributes:
        form: equal for calls that the same graph can replay.
        leaves: of the arguments, in order.
        spec: the pytree spec to unflatten the leaves.
        padding: what is known about the call's padding.
    """

    form: Hashable
    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    padding: Padding

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: torch.device) -> "Call":
        """Flatten a call's arguments.

        Raises:
            CannotCapture: an argument cannot be replayed, because it cannot have the same form again.
        """
        ids = kwargs.get("input_ids")
        if isinstance(ids, torch.Tensor) and ids.numel() > _MOST_TOKENS:
            raise CannotCapture(f"more than {_MOST_TOKENS} tokens")
        leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
        forms = tuple(_form(leaf, device) for leaf in leaves)
        padding = padding_of(args, kwargs)
        return cls((spec, forms, padding), tuple(leaves), spec, padding)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The arguments that must be copied to the graph's static buffers."""
        return [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]


def _form(leaf: Any, device: torch.device) -> Hashable:
    if isinstance(leaf, torch.Tensor):
        if leaf.device.type != device.type:
            raise CannotCapture(f"input on {leaf.device}")
        return torch.Tensor, leaf.shape, leaf.dtype
    if isinstance(leaf, Cache):
        return id(leaf), _addresses(leaf)
    if isinstance(leaf, CONSTANTS):
        return type(leaf), leaf
    raise CannotCapture(f"a {type(leaf).__name__} among the arguments")


def _addresses(cache: Cache) -> tuple[int, ...]:
    """Return the addresses of a cache's keys and values, if it keeps their number only on the device."""
    if isinstance(cache, EncoderDecoderCache):
        both = cache.self_attention_cache, cache.cross_attention_cache
        if not all(cache.is_updated.get(layer) for layer in range(len(both[1].layers))):
            raise CannotCapture("the first pass over an encoder's output")
        return _addresses(both[0]) + _addresses(both[1])
    # Other static layers have more state, or count tokens on the host.
    if not isinstance(cache, StaticCache) or any(type(layer) not in _KNOWN for layer in cache.layers):
        raise CannotCapture(f"keys and values in a {type(cache).__name__} that grows or slides")
    if not all(layer.is_initialized for layer in cache.layers):
        raise CannotCapture("keys and values without a place yet")
    layers = [layer for layer in cache.layers if isinstance(layer, StaticLayer)]
    return tuple(part.data_ptr() for layer in layers for part in (layer.keys, layer.values, layer.cumulative_length))
