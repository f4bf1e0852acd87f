"""The parameter that stands for a weight not on the device: it has shape and dtype, and using it is an error.

`state_dict()` detaches parameters, so detaching a placeholder reads the weight, until its engine is destroyed.
A plain meta tensor is no substitute: torch's CPU matrix products accept one and return uninitialised memory.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn

# Methods and attributes that modules and transformers use without reading the values.
_METHODS: Final = frozenset(
    {"__len__", "__repr__", "dim", "is_complex", "is_floating_point", "numel", "size", "stride"}
)
_ATTRIBUTES: Final = frozenset(
    {"device", "dtype", "grad", "grad_fn", "is_cpu", "is_cuda", "is_leaf", "is_meta", "itemsize", "nbytes", "ndim"}
    | {"requires_grad", "shape"}
)


class PlaceholderParameter(nn.Parameter):
    """A parameter on the meta device that raises an error if its values are used.

    Attributes:
        read: returns a copy of the values in host memory, for `state_dict()`; None without an engine.
    """

    read: Callable[[], torch.Tensor] | None
    _copy: Callable[[], torch.Tensor | None]

    @staticmethod
    def like(tensor: torch.Tensor) -> "PlaceholderParameter":
        """Make a placeholder with the shape and dtype of ``tensor``."""
        empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        made: PlaceholderParameter = torch.Tensor._make_subclass(PlaceholderParameter, empty, False)
        made.read, made._copy = None, lambda: None
        return made

    def _values(self) -> torch.Tensor:
        """Return a copy of the values; tied names share it while it is referenced, as saving expects."""
        if self.read is None:
            return self
        copy = self._copy()
        if copy is None:
            copy = self.read()
            self._copy = weakref.ref(copy)
        return copy

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name == "detach":
            return args[0]._values()
        if name == "requires_grad_":
            return args[0]
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        if name not in _METHODS and not (name == "__get__" and attribute in _ATTRIBUTES):
            raise RuntimeError(
                "this weight is not on the device: a streamed weight is there only while its block runs as a part of "
                "the model's forward, and no weight is after destroy()"
            )
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
