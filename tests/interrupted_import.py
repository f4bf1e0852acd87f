"""Interrupts a process inside one of its imports. It imports nothing heavy itself."""

import os
import signal
import sys
import time
from importlib.machinery import ModuleSpec
from pathlib import Path


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


def interrupt_import_beside(module: str, number: int, notes: str) -> None:
    """Send the signal when the module is about to be imported, once there is a file of this pattern."""

    class Finder:
        def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
            if name == module:
                while not [*Path().glob(notes)]:
                    time.sleep(0.01)
                os.kill(os.getpid(), number)
            return None

    sys.meta_path.insert(0, Finder())  # type: ignore[arg-type]
