"""A stand-in for CUDA graphs on the CPU.

It undoes what computing has left in keys and values, as a capture computes nothing, spoils what was given, and computes
anew in the same memory when it is replayed.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from transformers.cache_utils import Cache, EncoderDecoderCache

from zinfer.graphs import open_graphs
from zinfer.graphs.recorder import CudaRecorder, Recorder
from zinfer.graphs.static_caches import StaticCaches


class StandIn:
    """Records on the CPU.

    Attributes:
        caches, pages: where what is recorded may write.
    """

    def __init__(self) -> None:
        self.caches: list[Cache] = []
        self.pages: list[torch.Tensor] = []

    def record(self, function: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        places = [*self.pages, *(part for cache in self.caches for part in parts_of(cache))]
        before = [part.clone() for part in places]
        given = function()
        for place, value in zip(places, before, strict=True):
            place.copy_(value)
        kept = tensors_of(given)
        for tensor in kept:
            tensor.fill_(float("nan") if tensor.is_floating_point() else 77)

        def again() -> None:
            for tensor, value in zip(kept, tensors_of(function()), strict=True):
                tensor.copy_(value)

        return given, again

    def close(self) -> None:
        """Nothing is kept but what tests have put here."""


def tensors_of(given: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, torch.Tensor)]


def parts_of(cache: Cache) -> list[torch.Tensor]:
    if isinstance(cache, EncoderDecoderCache):
        return parts_of(cache.self_attention_cache) + parts_of(cache.cross_attention_cache)
    layers = [layer for layer in cache.layers if layer.is_initialized]
    return [part for layer in layers for part in (layer.keys, layer.values, layer.cumulative_length)]


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """Graphs also on the CPU; on a GPU they stay those of CUDA."""
    found = StandIn()
    plain = StaticCaches._take

    def recorder_for(device: torch.device) -> Recorder:
        return CudaRecorder() if device.type == "cuda" else found

    def take(self: StaticCaches, **kwargs: Any) -> Cache:
        found.caches.append(plain(self, **kwargs))
        return found.caches[-1]

    monkeypatch.setattr(open_graphs, "recorder_for", recorder_for)
    monkeypatch.setattr(StaticCaches, "_take", take)
    return found
