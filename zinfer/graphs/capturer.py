"""Captures launches as CUDA graphs, in pieces that are replayed one by one."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class CudaCapturer:
    """CUDA graphs that share their memory, since no two run at once: what one gives holds until the next runs.

    Within a session memory that is let go of may be taken again by what is captured after. So pieces must be replayed
    in the order in which they were captured; of several captured one after the other from the same state, one is
    enough.

    No kernel of a graph begins before what was enqueued ahead of its launch is done, nor is the graph done before all
    of them are: launches that need not wait for the kernel before (`kernels/launching.py`) depend so on kernels of
    their own graph alone.
    """

    def __init__(self) -> None:
        # A pool is gone for good once no graph uses it, and all may be dropped: an empty one keeps it.
        self._keeper: torch.cuda.CUDAGraph | None = None
        self._open: tuple[torch.cuda.CUDAGraph, torch.cuda.graph] | None = None

    @contextmanager
    def session(self) -> Iterator[None]:
        """The context of one capture's pieces; a piece that is open at its end is dropped."""
        # torch stays on a capture's stream when its end fails, and warns of empty captures, as those between blocks.
        with torch.cuda.stream(torch.cuda.current_stream()), warnings.catch_warnings(action="ignore"):
            try:
                yield
            finally:
                if self._open is not None:
                    self._give_up(*self._open)

    def begin(self) -> None:
        """Begin a piece: what is launched from here on computes nothing, and leaves memory that holds nothing yet.

        Launches of other threads, such as copies of weights, go on meanwhile.
        """
        if self._keeper is None:
            self._keeper = _empty_graph()
        graph = torch.cuda.CUDAGraph()
        # Open from before its begin until after its end: Ctrl-C may strike between any two lines.
        self._open = graph, _capture(graph, self._keeper.pool())
        self._open[1].__enter__()

    def end(self) -> Callable[[], None]:
        """End the piece; what computes it, in the same memory, again and again.

        Raises:
            RuntimeError: something was done that cannot be captured, such as waiting for the device.
        """
        assert self._open is not None
        graph, capture = self._open
        capture.__exit__(None, None, None)
        self._open = None
        return graph.replay

    def close(self) -> None:
        """Free the memory of what was captured, once nothing holds it any more. Idempotent."""
        self._keeper = None

    def _give_up(self, graph: torch.cuda.CUDAGraph, capture: torch.cuda.graph) -> None:
        """End a capture that is open still, and see to one that has broken off."""
        self._open = None
        with torch.cuda.stream(capture.capture_stream):
            try:
                graph.capture_end()
            except RuntimeError:  # it has broken off, or ended before; what broke it is on its way to the caller
                assert self._keeper is not None
                if _end_allocation(torch.cuda.current_device(), self._keeper.pool()):
                    # Torch goes on with the capture also where it keeps the pool's pinned memory. Nothing reaches that
                    # from here, and nothing can be captured into the pool again.
                    self._keeper = None
                # Random numbers that are not captured can be drawn again once the end of a capture has succeeded.
                _empty_graph()


def _end_allocation(device: int, pool: Any) -> bool:
    """Do what torch before 2.12 leaves undone where the end of a capture fails; whether there was anything.

    Its allocator goes on with the capture, so that no cached memory of the process is given back any more, and counts
    it among the users of the pool for ever. Later versions end it themselves, and count as they see fit.
    """
    try:
        torch._C._cuda_endAllocateToPool(device, pool)
    except RuntimeError:  # nothing is captured into the pool
        return False
    torch._C._cuda_releasePool(device, pool)
    return True


def _empty_graph() -> torch.cuda.CUDAGraph:
    """One with a memory pool of its own."""
    graph = torch.cuda.CUDAGraph()
    with warnings.catch_warnings(action="ignore"), _capture(graph, torch.cuda.graph_pool_handle()):
        pass  # torch warns that it is empty
    return graph


def _capture(graph: torch.cuda.CUDAGraph, pool: Any) -> torch.cuda.graph:
    # A capture may take another way than the run before it (transformers then writes masks out), whose kernels are
    # loaded only now: that is forbidden in all modes but this one.
    return torch.cuda.graph(graph, pool=pool, capture_error_mode="relaxed")
