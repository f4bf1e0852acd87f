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


class CudaRecorder:
    """CUDA graphs that share their memory, since no two run at once: what one gives holds until the next runs."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        # A pool is gone for good once no graph uses it, and all may be dropped: an empty one keeps it.
        self._keeper = torch.cuda.CUDAGraph()
        with warnings.catch_warnings(action="ignore"), self._recording(self._keeper):  # torch warns that it is empty
            pass

    def record(self, function: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """As `Recorder.record`; launches of other threads, such as copies of weights, go on meanwhile."""
        graph = torch.cuda.CUDAGraph()
        with self._recording(graph):
            given = function()
        return given, graph.replay

    def _recording(self, graph: torch.cuda.CUDAGraph) -> torch.cuda.graph:
        # A capture may take another way than the run before it (transformers then writes masks out), whose kernels are
        # loaded only now: that is forbidden in all modes but this one.
        return torch.cuda.graph(graph, pool=self._pool, capture_error_mode="relaxed")
