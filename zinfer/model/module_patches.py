"""Replaces methods of single modules, in order, and puts the former ones back."""

from collections.abc import Callable
from typing import Any

from torch import nn

_ABSENT = object()


class ModulePatches:
    """Methods replaced until `undo`. A patch may call the method that it found, which may be a patch too."""

    def __init__(self) -> None:
        self._patches: list[tuple[nn.Module, str, Callable[..., Any], object]] = []

    def patch(self, module: nn.Module, function: Callable[..., Any], method: str = "forward") -> None:
        """Let the module call ``function`` by the name of ``method``, without itself as an argument."""
        self._patches.append((module, method, function, module.__dict__.get(method, _ABSENT)))
        module.__dict__[method] = function

    def undo(self) -> None:
        """Put the former methods back, last patch first; what somebody else has patched since stays. Idempotent."""
        while self._patches:
            module, method, function, former = self._patches[-1]
            if module.__dict__.get(method) is function:
                if former is _ABSENT:
                    del module.__dict__[method]
                else:
                    module.__dict__[method] = former
            self._patches.pop()


def is_patched(module: nn.Module, method: str = "forward") -> bool:
    """Whether somebody has replaced a module's method."""
    return method in module.__dict__
