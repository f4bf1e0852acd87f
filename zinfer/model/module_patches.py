"""Replaces methods of single modules, and restores the former ones."""

from collections.abc import Callable
from typing import Any

from torch import nn

_ABSENT = object()


class ModulePatches:
    """Methods replaced until `undo`. A patch may call the method that it replaced, which may be a patch too."""

    def __init__(self) -> None:
        self._patches: list[tuple[nn.Module, str, Callable[..., Any], object]] = []

    def patch(self, module: nn.Module, function: Callable[..., Any], method: str = "forward") -> None:
        """Replace the module's ``method`` by ``function``, which is called without ``self``."""
        self._patches.append((module, method, function, module.__dict__.get(method, _ABSENT)))
        module.__dict__[method] = function

    def undo(self) -> None:
        """Restore the former methods, last patch first, except where others have patched since. Idempotent."""
        while self._patches:
            module, method, function, former = self._patches[-1]
            if module.__dict__.get(method) is function:
                if former is _ABSENT:
                    del module.__dict__[method]
                else:
                    module.__dict__[method] = former
            self._patches.pop()


def is_patched(module: nn.Module, method: str = "forward") -> bool:
    """Whether a module's method is replaced."""
    return method in module.__dict__
