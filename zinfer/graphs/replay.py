"""What an engine keeps to replay its module's forwards, or the reason why it does not."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from zinfer.config import Settings
from zinfer.graphs.forward_graphs import ForwardGraphs, GraphCounts
from zinfer.graphs.recorder import CudaRecorder, Recorder
from zinfer.graphs.static_caches import StaticCaches
from zinfer.planning.planner import Plan

log = logging.getLogger(__name__)


class Replay:
    """Graphs of a model's forward, and what lets `generate` use them.

    Args:
        model: its forward must not be overlaid yet: `wrap` goes around it.
        graphs: with none made yet.
    """

    def __init__(self, model: PreTrainedModel, graphs: ForwardGraphs) -> None:
        self._graphs = graphs
        self._caches = StaticCaches(model, graphs)

    @property
    def counts(self) -> GraphCounts:
        return self._graphs.counts

    def wrap(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """As `ForwardGraphs.wrap`."""
        return self._graphs.wrap(forward)

    def eagerly(self, work: Callable[[], Any]) -> Any:
        """As `ForwardGraphs.eagerly`."""
        return self._graphs.eagerly(work)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As `StaticCaches.generate`."""
        return self._caches.generate(*args, **kwargs)

    def close(self) -> None:
        """Give the memory back. May be called again."""
        self._caches.close()
        self._graphs.close()


def open_graphs(plan: Plan, settings: Settings, device: torch.device) -> ForwardGraphs | None:
    """What the settings ask for; None where they do not, or where nothing can be replayed, which is logged."""
    if not settings.cuda_graph:
        return None
    recorder = recorder_for(device)
    if recorder is None:
        hindrance = "graphs need a CUDA device"
    elif plan.num_slots:
        hindrance = "weights stream, so that their places change; give the device room for all of them"
    elif settings.check_finite:
        hindrance = "zinfer.check_finite looks at every layer"
    elif settings.batching.kv_cache_tier == "host":
        hindrance = "the places of keys and values in host memory change"
    else:
        return ForwardGraphs(recorder, device)
    log.warning("enable_cuda_graph: %s; Python launches every forward", hindrance)
    return None


def recorder_for(device: torch.device) -> Recorder | None:
    """What records on a device."""
    return CudaRecorder() if device.type == "cuda" else None
