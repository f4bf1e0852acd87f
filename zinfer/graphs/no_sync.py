"""Refuses operators that make the host wait for the device, which is not allowed while a graph is captured."""

from types import TracebackType
from typing import Any, Final

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from zinfer.graphs.form import CannotCapture

_aten: Final = torch.ops.aten
_ASKING: Final = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
"""Torch's own tags for operators that return values to the host, or whose result shapes depend on values."""
_READING: Final = (_aten.index, _aten._unsafe_index)
_WRITING: Final = (_aten.index_put, _aten.index_put_, _aten._index_put_impl_, _aten._unsafe_index_put)


class NoSyncMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operators that wait, before they reach the device.

    CUDA refuses them too, but aborts the capture and leaves torch in an inconsistent state. Waits inside operators and
    outside of torch are not detected here.

    Args:
        device: of the captured forward.

    Raises:
        CannotCapture: in the operator; and again on exit if code caught it, since that took another path than usual.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kind = device.type
        self._refused: str | None = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        refused, self._refused = self._refused, None
        if error is None and refused is not None:
            raise CannotCapture(refused)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled():  # composite operators are not decomposed in inference mode
            super().__enter__()  # type: ignore[no-untyped-call]
            try:
                found = func.decompose(*args, **kwargs)
            finally:
                super().__exit__(None, None, None)  # type: ignore[no-untyped-call]
            if found is not NotImplemented:
                return found
        if _waits(self._kind, func, args, kwargs):
            self._refused = f"{func.name()} waits for the device"
            raise CannotCapture(self._refused)
        return func(*args, **kwargs)


def _waits(kind: str, func: Any, args: Any, kwargs: Any) -> bool:
    packet = func.overloadpacket
    if packet is _aten.copy_:
        return _copy_waits(kind, *args, **kwargs)
    if packet is _aten._to_copy:
        return _to_copy_waits(kind, *args, **kwargs)
    leaves = pytree.tree_leaves((args, kwargs))
    if not any(isinstance(leaf, torch.Tensor) and leaf.device.type == kind for leaf in leaves):
        return False
    if packet in _READING:
        return bool(_masks(args[1])) or _are_elsewhere(kind, args[1])
    if packet in _WRITING:
        return _writing_waits(kind, *args, **kwargs)
    if func is _aten.repeat_interleave.Tensor and kwargs.get("output_size") is not None:
        return False
    return any(tag in func.tags for tag in _ASKING)


def _copy_waits(kind: str, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> bool:
    host = target if target.device.type == "cpu" else source
    return _are_apart(kind, source.device, target.device) and not (non_blocking and host.is_pinned())


def _to_copy_waits(
    kind: str, source: torch.Tensor, *, device: torch.device | None = None, non_blocking: bool = False, **others: Any
) -> bool:
    target = source.device if device is None else device
    # torch pins the host memory that it allocates for a non-blocking copy.
    is_pinned = target.type == "cpu" or source.is_pinned()
    return _are_apart(kind, source.device, target) and not (non_blocking and is_pinned)


def _are_apart(kind: str, one: torch.device, other: torch.device) -> bool:
    """Return whether one is the host and the other the device."""
    return one.type != other.type and {one.type, other.type} == {"cpu", kind}


def _writing_waits(
    kind: str, target: torch.Tensor, places: Any, values: torch.Tensor, accumulate: bool = False, *others: Any
) -> bool:
    masks = _masks(places)
    are_masks_alone = len(masks) == sum(place is not None for place in places) == 1
    if are_masks_alone and values.device.type == "cpu" and values.numel() == 1 and not accumulate:
        return False  # torch runs a masked fill with a host number
    return bool(masks) or _are_elsewhere(kind, places) or _are_apart(kind, values.device, target.device)


def _are_elsewhere(kind: str, places: Any) -> bool:
    """Return whether any index is on the host, from which the operator copies it."""
    return any(place is not None and place.device.type != kind for place in places)


def _masks(places: Any) -> list[torch.Tensor]:
    return [place for place in places if place is not None and place.dtype in (torch.bool, torch.uint8)]
