"""Captures and replays a module's forward as CUDA graphs."""

import functools
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.cache_utils import Cache

from zinfer.graphs.capture import Capture, DependentLaunchAdds, EscapeDetector
from zinfer.graphs.capturer import CudaCapturer
from zinfer.graphs.form import CONSTANTS, Call, CannotCapture
from zinfer.graphs.masks import spared
from zinfer.graphs.no_sync import NoSyncMode
from zinfer.graphs.splits import GraphSplits

_MOST_GRAPHS: Final = 64  # an `LLM` of a few dozen rows has some 30 forms
_MOST_PIECES: Final = 512
"""In total, unless one form alone has more: the driver keeps some device memory for each."""
_MOST_FORMS: Final = 1024  # remembered; the oldest is forgotten first
FIRST: Final = "the first of its form"
RARE: Final = "its form has been rare so far"


@dataclass
class GraphCounts:
    """How forwards ran since the engine was created.

    Attributes:
        captured: forwards captured.
        pieces: graphs that they consist of: one; or, where weights stream, one for each slot of each streamed block,
            and one between two blocks.
        replayed: forwards that were replayed.
        eager: forwards and calls of `generate` that ran eagerly, by reason.
    """

    captured: int = 0
    pieces: int = 0
    replayed: int = 0
    eager: Counter[str] = field(default_factory=Counter)


class ForwardGraphs:
    """Captures a forward once input of its form has arrived ``patience`` times, and replays it.

    Args:
        device: of all tensors.
        most_streamed_bytes: as for `GraphSplits`.
        patience: eager forwards of a form before it is captured.

    Attributes:
        patience: as the argument, from now on.
        cuts: splits at blocks that stream.
        counts: of captures and replays.
        is_settled: whether the next forward of the last one's form will take as long: the last one was not captured,
            and no later one will be.
    """

    def __init__(
        self,
        capturer: CudaCapturer,
        device: torch.device,
        most_streamed_bytes: int | None = None,
        patience: int = 1,
    ) -> None:
        self.patience = patience
        self.cuts = GraphSplits(most_streamed_bytes)
        self._capturer = capturer
        self._device = device
        # By form, and by the arrangement of streamed blocks.
        self._graphs: OrderedDict[tuple[Hashable, Hashable], _Graph] = OrderedDict()
        # How often a form was seen, or why it cannot be captured.
        self._seen: OrderedDict[Hashable, int | str] = OrderedDict()
        self._off = ""  # why nothing is replayed
        self._is_compiled = False
        self.counts = GraphCounts()
        self.is_settled = True

    def eagerly(self, work: Callable[[], Any], reason: str) -> Any:
        """Run ``work`` without replaying forwards, so that their hooks are called."""
        former, self._off = self._off, reason
        try:
            return work()
        finally:
            self._off = former

    def wrap(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that passes each call of the forward to `call`."""

        @functools.wraps(forward)
        def replayed(*args: Any, **kwargs: Any) -> Any:
            return self.call(forward, *args, **kwargs)

        return replayed

    def call(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return the forward's result, by replay where possible.

        Args:
            forward: always the same; its result depends only on its arguments and the slots of streamed weights. Hooks
                in it run only in forwards that are not replayed.
        """
        before, self.is_settled = self.counts.captured, True
        try:
            if self._off:
                raise CannotCapture(self._off)
            call = Call.of(args, kwargs, self._device)
            graph = self._find(call, (call.form, self.cuts.arrangement()), forward)
        except CannotCapture as error:
            reason = str(error)
        else:
            self.counts.replayed += 1
            self.is_settled = self.counts.captured == before
            return graph.replay(call.tensors)
        self.counts.eager[reason] += 1
        return forward(*args, **kwargs)

    def forget(self, cache: Cache) -> None:
        """Drop the graphs that use the cache, which they keep alive."""
        for form in [form for form, graph in self._graphs.items() if any(leaf is cache for leaf in graph.leaves)]:
            del self._graphs[form]

    def close(self) -> None:
        """Free all graphs' memory; later calls are captured again. Idempotent."""
        self._graphs.clear()
        self._capturer.close()

    def begin_anew(self) -> None:
        """Forget all forms: from now on forwards have parts compiled by torch.compile, which does not run them in the
        dispatch modes of a capture."""
        self.close()
        self._seen.clear()
        self._is_compiled = True

    def _find(self, call: Call, form: tuple[Hashable, Hashable], forward: Callable[..., Any]) -> "_Graph":
        graph = self._graphs.get(form)
        if graph is None:
            self._expect_again(form)
            graph = self._capture(call, form, forward)
            self._make_room(graph, form)
            self.counts.captured += 1
            self.counts.pieces += graph.num_pieces
            self._graphs[form] = graph
        self._graphs.move_to_end(form)
        return graph

    def _make_room(self, graph: "_Graph", form: tuple[Hashable, Hashable]) -> None:
        """Drop the least recently replayed graph and, if there are too many pieces, graphs for other arrangements.

        Large forms would evict each other again and again, so the first ones stay.
        """
        if self._has_too_many_with(graph):
            for other in [other for other in self._graphs if other[1] != form[1]]:
                del self._graphs[other]
        if self._has_too_many_with(graph):
            raise self._never(form, "too many graphs of other forms")
        if len(self._graphs) == _MOST_GRAPHS:
            dropped, _ = self._graphs.popitem(last=False)
            self._seen[dropped] = 0  # to be captured again it has to recur: more forms than graphs may come in turn

    def _has_too_many_with(self, graph: "_Graph") -> bool:
        pieces = [each.num_pieces for each in self._graphs.values()]
        return bool(pieces) and sum(pieces) + graph.num_pieces > _MOST_PIECES

    def _capture(self, call: Call, form: Hashable, forward: Callable[..., Any]) -> "_Graph":
        # A capture computes nothing: if it fails, the forward runs eagerly, and real errors are raised there.
        handled = sys.exception()
        modes: list[TorchDispatchMode] = []
        inside = None
        if not self._is_compiled:
            modes = [NoSyncMode(self._device), DependentLaunchAdds()]  # type: ignore[no-untyped-call]
            inside = EscapeDetector() if self.cuts.are_any else None
        capture = Capture(self._capturer, modes, inside)
        try:
            with self.cuts.within(capture):
                return _Graph(forward, capture, call, self._capturer.unowned)
        except (RuntimeError, CannotCapture) as error:
            raise self._never(form, f"cannot be captured: {_reason(error, handled)}") from error

    def _never(self, form: Hashable, reason: str) -> CannotCapture:
        """Return the error of a form that stays eager."""
        self._seen[form] = reason
        return CannotCapture(reason)

    def _expect_again(self, form: Hashable) -> None:
        """Raise CannotCapture unless the form was seen often enough before and its capture did not fail."""
        seen = self._seen.setdefault(form, 0)
        if isinstance(seen, str):
            raise CannotCapture(seen)
        if seen < self.patience:
            self._seen[form] = seen + 1
            if len(self._seen) > _MOST_FORMS:
                self._seen.popitem(last=False)
            self.is_settled = False
            raise CannotCapture(FIRST if not seen else RARE)


def _reason(error: BaseException, handled: BaseException | None) -> str:
    """Return the first line of the root cause, since the end of a failed capture raises an error without a reason.

    Args:
        handled: an exception that the caller was handling before, which is not a cause.
    """
    while True:
        before = error.__cause__ if error.__suppress_context__ else error.__context__
        if before is None or before is handled:
            # Return text: the error itself would keep all tensors of its frames alive.
            return next(iter(str(error).splitlines()), type(error).__name__)
        error = before


class _Graph:
    """A captured forward, its static inputs and its results."""

    def __init__(
        self, forward: Callable[..., Any], capture: Capture, call: Call, unowned: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        self.leaves = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in call.leaves]
        self._places = [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]
        args, kwargs = pytree.tree_unflatten(self.leaves, call.spec)

        def compute() -> Any:
            with spared(call.padding):
                return forward(*args, **kwargs)

        given = capture.run(compute)
        self._steps, self.num_pieces = capture.steps, capture.num_pieces
        found, self._spec = pytree.tree_flatten(given)
        known = [id(leaf) for leaf in self.leaves]
        for leaf in found:
            if not isinstance(leaf, (torch.Tensor, *CONSTANTS)) and id(leaf) not in known:
                raise CannotCapture(f"it returns a {type(leaf).__name__}")
        self._given = [unowned(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in found]

    def replay(self, tensors: list[torch.Tensor]) -> Any:
        for place, tensor in zip(self._places, tensors, strict=True):
            place.copy_(tensor)
        for step in self._steps:
            step()
        # The next graph may reuse this memory.
        given = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in self._given]
        return pytree.tree_unflatten(given, self._spec)
