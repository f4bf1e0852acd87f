"""Captures a forward in pieces, in the order in which they are replayed, and checks its operators meanwhile."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Final

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from zinfer.graphs.capturer import CudaCapturer
from zinfer.graphs.masks import float_masks
from zinfer.kernels.add import added_kernel
from zinfer.kernels.launching import INTERPRETED, is_dependent

_MOST_ELEMENTS: Final = 1 << 16
_DTYPES: Final = (torch.float16, torch.bfloat16)


class EscapeDetector(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tracks the memory that torch's operators allocate between `begin` and `end`.

    Intermediate results of a part of a forward must not be used outside of it, because each of the part's captures
    computes them at another address.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._taken: list[StorageWeakRef] | None = None

    def begin(self) -> None:
        """Start tracking."""
        self._taken = []

    def end(self, given: Any) -> bool:
        """Stop tracking; return whether anything but ``given`` still references the memory."""
        taken, self._taken = self._taken, None
        assert taken is not None
        known = {storage.cdata for storage in _storages(given)}
        return any(not storage.expired() and storage.cdata not in known for storage in taken)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if self._taken is not None:
            before = {storage.cdata for storage in _storages((args, kwargs))}
            self._taken += [storage for storage in _storages(found) if storage.cdata not in before]
        return found


def _storages(tree: Any) -> list[StorageWeakRef]:
    tensors = (leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor))
    return [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]  # type: ignore[no-untyped-call]


class DependentLaunchAdds(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds small 16-bit tensors of one shape with a kernel that lets the next kernel start early."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.add.Tensor and not kwargs and _are_taken(*args):
            return added_kernel(*args)
        return func(*args, **(kwargs or {}))


def _are_taken(x: object, y: object) -> bool:
    if not all(type(each) in (torch.Tensor, torch.nn.Parameter) for each in (x, y)):
        return False
    assert isinstance(x, torch.Tensor)
    assert isinstance(y, torch.Tensor)
    are_alike = (x.shape, x.dtype, x.device) == (y.shape, y.dtype, y.device)
    is_small = (INTERPRETED or is_dependent(x.device)) and x.dtype in _DTYPES and x.numel() <= _MOST_ELEMENTS
    return are_alike and is_small and x.is_contiguous() and y.is_contiguous()


class Capture:
    """Steps that together compute a forward: one piece, or several with other work between them.

    Args:
        modes: dispatch modes in which the forward runs; the last one sees its operators first.
        inside: an outermost mode that tracks intermediate results of a part of the forward.

    Attributes:
        steps: to be run in order.
        num_pieces: captured so far.
    """

    def __init__(
        self, capturer: CudaCapturer, modes: Sequence[TorchDispatchMode], inside: EscapeDetector | None
    ) -> None:
        self._capturer = capturer
        self._modes = [*([] if inside is None else [inside]), *modes]
        self._forget_masks: Callable[[], None] | None = None
        self.inside = inside
        self.steps: list[Callable[[], None]] = []
        self.num_pieces = 0

    def run(self, forward: Callable[[], Any]) -> Any:
        """Capture a forward and return its results, whose memory is not computed yet.

        Raises:
            RuntimeError, CannotCapture: it cannot be captured.
        """
        with self._capturer.session(), float_masks() as self._forget_masks, ExitStack() as modes:
            for mode in self._modes:
                modes.enter_context(mode)
            self.begin()
            given = forward()
            self.steps.append(self.end())
        return given

    def begin(self) -> None:
        """Begin a piece."""
        self._capturer.begin()

    def end(self) -> Callable[[], None]:
        """End a piece and return a function that replays it. No other piece may use its float masks."""
        assert self._forget_masks is not None
        self._forget_masks()
        self.num_pieces += 1
        return self._capturer.end()
