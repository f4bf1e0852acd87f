"""Replacements of recognised modules' forwards, and the probes that recognise modules."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Overlay:
    """A method that replaces a module's own.

    Attributes:
        kind: the fused operations, in words; empty if another module's overlay has them.
        forward: same arguments and result as the module's own; bound to the module, so that copies get their own.
        method: name of the replaced method.
    """

    kind: str
    forward: Callable[..., Any]
    method: str = "forward"


def num_inputs(module: nn.Module) -> int:
    """Return the number of arguments of the module's own forward."""
    return len(inspect.signature(type(module).forward).parameters) - 1


def own_unless(module: nn.Module, compute: Callable[[Any, Any], Any]) -> MethodType:
    """Return a forward that calls ``compute(module, input)``, and the module's own if that returns NotImplemented."""
    plain = type(module).forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = NotImplemented if kwargs or len(args) != 1 else compute(self, args[0])
        return plain(self, *args, **kwargs) if found is NotImplemented else found

    return MethodType(forward, module)


def probe(function: Callable[..., Any], *numbers: Any) -> Any:
    """Return the function's result for a few numbers; None if it fails."""
    try:
        return function(*numbers)
    except Exception:  # a family's code may raise anything for unexpected arguments
        return None


def is_near(given: Any, wanted: torch.Tensor) -> bool:
    """Return whether ``given`` is the wanted tensor, up to rounding."""
    return (
        isinstance(given, torch.Tensor)
        and given.shape == wanted.shape
        and given.dtype == wanted.dtype
        and given.device == wanted.device
        and torch.allclose(given, wanted, rtol=1e-4, atol=1e-5)
    )


def stand_in(module: nn.Module, **parts: Any) -> nn.Module:
    """Return a copy of a module that shares all but the named parameters and submodules."""
    copy = type(module).__new__(type(module))
    parameters = {name: part for name, part in parts.items() if name in module._parameters}
    modules = {name: part for name, part in parts.items() if name in module._modules}
    assert len(parameters) + len(modules) == len(parts), "the module lacks a part"
    copy.__dict__ = {
        **module.__dict__,
        "_parameters": {**module._parameters, **parameters},
        "_modules": {**module._modules, **modules},
    }
    return copy
