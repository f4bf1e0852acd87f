"""Interrupts a process inside one of its imports. It imports nothing heavy itself."""

import os
import signal
import sys
from importlib.machinery import ModuleSpec


class _Finder:
    def __init__(self, module: str, number: int) -> None:
        self._module = module
        self._number = number

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name == self._module:
            sys.meta_path.remove(self)  # type: ignore[arg-type]
            os.kill(os.getpid(), self._number)
        return None


def interrupt_import(module: str, number: int = signal.SIGINT) -> None:
    """Send the signal when the module is about to be imported."""
    sys.meta_path.insert(0, _Finder(module, number))  # type: ignore[arg-type]
