"""`OnDevice`: DeepSpeed's context manager to build a module without its weights."""

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

_MAKERS: Final = frozenset({torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.tensor})


class OnDevice(TorchFunctionMode):
    """Context manager that builds modules on a device and in a dtype; on the meta device they take no memory.

    Pass such a module to `zinfer.init_inference` together with ``checkpoint=``.

    Args:
        dtype: of floating-point tensors made without an explicit dtype; torch's default dtype, which transformers sets
            to the config's, is overridden.
        device: "meta", or any other.
        enabled: False: do nothing.
    """

    def __init__(self, dtype: torch.dtype, device: str | torch.device = "meta", enabled: bool = True) -> None:
        super().__init__()
        self._dtype = dtype
        self._device = torch.device(device)
        self._enabled = enabled

    def __enter__(self) -> "OnDevice":
        if self._enabled:
            self._device.__enter__()
            super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._enabled:
            super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
            self._device.__exit__(kind, error, trace)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in _MAKERS and (kwargs or {}).get("dtype") is None and made.is_floating_point():
            return made.to(self._dtype)
        return made
