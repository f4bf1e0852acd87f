"""A checkpoint on disk: its folder, and the places of its tensors in files; no weights are read here.

`zinfer.checkpoint.folder` imports no torch, so that a name that is no model is refused at once.
"""

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from zinfer.checkpoint.checkpoint import Checkpoint
    from zinfer.checkpoint.folder import resolve_folder
    from zinfer.checkpoint.header import Header, JoinedTensor, TensorEntry, read_header

__all__ = ["Checkpoint", "Header", "JoinedTensor", "TensorEntry", "read_header", "resolve_folder"]

_HOMES: Final = {"Checkpoint": "checkpoint", "resolve_folder": "folder"}
"""The module of each public name; the others are in `zinfer.checkpoint.header`."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES.get(name, 'header')}"), name)
    globals()[name] = value
    return value
