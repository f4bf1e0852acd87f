"""A forward while it is captured: pieces, in the order in which they are replayed."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Final

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from zinfer.graphs.capturer import CudaCapturer
from zinfer.graphs.float_masks import float_masks
from zinfer.kernels.add import added_kernel
from zinfer.kernels.launching import INTERPRETED, is_dependent

_MOST_ELEMENTS: Final = 1 << 16
_DTYPES: Final = (torch.float16, torch.bfloat16)


class EscapeDetector(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches the memory that torch's operators take between `begin` and `end`.

    What is computed within a part of a forward must not be seen outside of it: of several captures of the part, each
    computes it somewhere else.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._taken: list[StorageWeakRef] | None = None

    def begin(self) -> None:
        """Watch from here on."""
        self._taken = []

    def end(self, given: Any) -> bool:
        """Stop watching; whether memory that was taken is still referenced, and is none of what is given."""
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
    """Computes what code within it adds with ``+`` by a kernel that lets the one after it begin early.

    Of two tensors that are of one small shape and 16 bits.
    """

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
    """Steps that together compute a forward: one piece, or several where something has to be done between them.

    Args:
        capturer: makes the pieces.
        modes: within which the forward runs, the last one sees its operators first.
        inside: one mode more, around the others, which watches what is computed within a part of the forward; None:
            it is not needed.

    Attributes:
        steps: what computes the forward, one after the other.
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
        """Capture a forward; what it gives, with memory that holds nothing yet.

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
        """End a piece; what computes it. Its numbers of masks are its own: another may be replayed for it."""
        assert self._forget_masks is not None
        self._forget_masks()
        self.num_pieces += 1
        return self._capturer.end()
