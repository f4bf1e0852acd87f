"""Records what is launched, without computing it."""

import warnings
from collections.abc import Callable
from typing import Any, Protocol

import torch


class Recorder(Protocol):
    """Makes replayable what a function computes."""

    def record(self, function: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """What the function gives, with memory that holds nothing yet, and what computes it there, again and again.

        Raises:
            RuntimeError: the function does what cannot be recorded, such as waiting for the device.
        """
        ...

    def close(self) -> None:
        """Give the memory of what was recorded back, once nobody holds that any more; may be called again."""
        ...


class CudaRecorder:
    """CUDA graphs that share their memory, since no two run at once: what one gives holds until the next runs."""

    def __init__(self) -> None:
        # A pool is gone for good once no graph uses it, and all may be dropped: an empty one keeps it.
        self._keeper: torch.cuda.CUDAGraph | None = None

    def record(self, function: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """As `Recorder.record`; launches of other threads, such as copies of weights, go on meanwhile."""
        if self._keeper is None:
            self._keeper = _empty_graph()
        graph = torch.cuda.CUDAGraph()
        with _recording(graph, self._keeper.pool()):
            given = function()
        return given, graph.replay

    def close(self) -> None:
        """As `Recorder.close`: a pool gives nothing back as long as a graph uses it."""
        self._keeper = None


def _empty_graph() -> torch.cuda.CUDAGraph:
    """One with a memory pool of its own."""
    graph = torch.cuda.CUDAGraph()
    with warnings.catch_warnings(action="ignore"), _recording(graph, torch.cuda.graph_pool_handle()):
        pass  # torch warns that it is empty
    return graph


def _recording(graph: torch.cuda.CUDAGraph, pool: Any) -> torch.cuda.graph:
    # A capture may take another way than the run before it (transformers then writes masks out), whose kernels are
    # loaded only now: that is forbidden in all modes but this one.
    return torch.cuda.graph(graph, pool=pool, capture_error_mode="relaxed")
