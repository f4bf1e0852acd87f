"""A stand-in for CUDA graphs on the CPU.

It undoes what computing has left in keys and values, as a capture computes nothing, spoils what was given, and computes
anew in the same memory when it is replayed. What would wait for the device fails, and transformers takes it for a
capture, in which it asks tensors for nothing.
"""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.utils import import_utils

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
        given = captured(function)
        for place, value in zip(places, before, strict=True):
            place.copy_(value)
        kept = tensors_of(given)
        for tensor in kept:
            tensor.fill_(float("nan") if tensor.is_floating_point() else 77)

        def again() -> None:
            for tensor, value in zip(kept, tensors_of(captured(function)), strict=True):
                tensor.copy_(value)

        return given, again

    def close(self) -> None:
        """Nothing is kept but what tests have put here."""


class _Waiting(TorchDispatchMode):
    """Lets nothing pass that brings a number to the host."""

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default or func is torch.ops.aten.nonzero.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        return func(*args, **(kwargs or {}))


def captured(function: Callable[[], Any]) -> Any:
    with mock.patch.object(import_utils, "is_cuda_stream_capturing", return_value=True), _Waiting():
        return function()


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
