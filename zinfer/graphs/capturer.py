"""Captures launches as CUDA graphs, in pieces that are replayed one after another."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class CudaCapturer:
    """Captures CUDA graphs that share their memory, since no two run at once: a result is valid until the next replay.

    Within a session, later captures may reuse memory that was freed. So pieces must be replayed in the order in which
    they were captured; of alternatives captured one after another from the same state, replay one.

    No kernel of a graph starts before the work enqueued ahead of its launch is done, and the graph is not done before
    all its kernels are. So launches that do not wait for the previous kernel (`kernels/launching.py`) depend only on
    kernels of their own graph.
    """

    def __init__(self) -> None:
        # A pool is destroyed once no graph uses it, and all graphs may be dropped: an empty graph keeps it alive.
        self._keeper: torch.cuda.CUDAGraph | None = None
        self._open: tuple[torch.cuda.CUDAGraph, torch.cuda.graph] | None = None

    @contextmanager
    def session(self) -> Iterator[None]:
        """Return a context for the pieces of one capture; a piece still open at its end is dropped."""
        # torch stays on a capture's stream when its end fails, and warns of empty captures, such as those between
        # blocks.
        with torch.cuda.stream(torch.cuda.current_stream()), warnings.catch_warnings(action="ignore"):
            try:
                yield
            finally:
                if self._open is not None:
                    self._abort(*self._open)

    def begin(self) -> None:
        """Begin a piece: from here on launches are only captured, and their results are not computed.

        Launches of other threads, such as copies of weights, run as usual.
        """
        if self._keeper is None:
            self._keeper = _empty_graph()
        graph = torch.cuda.CUDAGraph()
        # Set before the capture begins and cleared after it ends: Ctrl-C may arrive between any two lines.
        self._open = graph, _capture(graph, self._keeper.pool())
        self._open[1].__enter__()

    def end(self) -> Callable[[], None]:
        """End the piece and return a function that replays it, in the same memory each time.

        Raises:
            RuntimeError: an operation cannot be captured, such as waiting for the device.
        """
        assert self._open is not None
        graph, capture = self._open
        capture.__exit__(None, None, None)
        self._open = None
        return graph.replay

    def unowned(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a captured result over the same memory, which later captures may use, too, once ``tensor`` is gone.

        So results of all graphs together take the memory of the largest. The graph keeps it mapped.
        """
        storage = tensor.untyped_storage()
        alias = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), tensor.device, storage.nbytes())
        place = tensor.storage_offset(), tensor.shape, tensor.stride()
        return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(alias, *place)

    def close(self) -> None:
        """Free the memory of all captures once no graph uses it. Idempotent."""
        self._keeper = None

    def _abort(self, graph: torch.cuda.CUDAGraph, capture: torch.cuda.graph) -> None:
        """End a capture that is still open, and clean up after one that has failed."""
        self._open = None
        with torch.cuda.stream(capture.capture_stream):
            try:
                graph.capture_end()
            except RuntimeError:  # it failed or ended before; its error is already being raised
                assert self._keeper is not None
                if _end_allocation(torch.cuda.current_device(), self._keeper.pool()):
                    # Torch also continues the capture in its allocator of pinned memory, which cannot be reached from
                    # here: nothing can be captured into this pool again.
                    self._keeper = None
                # Random numbers can be drawn outside captures again only after the end of a capture has succeeded.
                _empty_graph()


def _end_allocation(device: int, pool: Any) -> bool:
    """Clean up what torch before 2.12 does not when the end of a capture fails; return whether this was necessary.

    Its allocator continues the capture, so that the process never frees cached memory again, and counts the capture
    among the pool's users forever. Later versions end the capture themselves.
    """
    try:
        torch._C._cuda_endAllocateToPool(device, pool)
    except RuntimeError:  # no capture into the pool is open
        return False
    torch._C._cuda_releasePool(device, pool)
    return True


def _empty_graph() -> torch.cuda.CUDAGraph:
    """Return an empty graph with its own memory pool."""
    graph = torch.cuda.CUDAGraph()
    with warnings.catch_warnings(action="ignore"), _capture(graph, torch.cuda.graph_pool_handle()):
        pass  # torch warns that it is empty
    return graph


def _capture(graph: torch.cuda.CUDAGraph, pool: Any) -> torch.cuda.graph:
    # A capture may take another code path than the run before it (transformers then materializes masks). Its kernels
    # are loaded only now, which only this mode allows.
    return torch.cuda.graph(graph, pool=pool, capture_error_mode="relaxed")
