"""The weights of a model on disk: folder, headers, tensors by name, and the published formats of quantized ones.

`zinfer.weights.folder` and `zinfer.weights.hub` import no torch, so that a name that is no model is refused at once.
"""

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from zinfer.weights.checkpoint import Checkpoint
    from zinfer.weights.header import Header, JoinedTensor, TensorEntry, read_header
    from zinfer.weights.hub import resolve_folder

__all__ = ["Checkpoint", "Header", "JoinedTensor", "TensorEntry", "read_header", "resolve_folder"]

_HOMES: Final = {"Checkpoint": "checkpoint", "resolve_folder": "hub"}
"""The module of each public name; the others are in `zinfer.weights.header`."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES.get(name, 'header')}"), name)
    globals()[name] = value
    return value
