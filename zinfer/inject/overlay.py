"""What a recognised module computes by instead, and the probes that recognise it."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Overlay:
    """What a module is to compute by.

    Attributes:
        kind: what is fused, in words; none where another module's overlay says it.
        forward: takes and gives what the module's own does; a method, so that a copy of the module has its own.
        method: the name of what is overlaid.
    """

    kind: str
    forward: Callable[..., Any]
    method: str = "forward"


def num_inputs(module: nn.Module) -> int:
    """Arguments of the module's own forward."""
    return len(inspect.signature(type(module).forward).parameters) - 1


def own_unless(module: nn.Module, compute: Callable[[Any, Any], Any]) -> MethodType:
    """A forward by ``compute``, of the module and its one input; the module's own where that gives NotImplemented."""
    plain = type(module).forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = NotImplemented if kwargs or len(args) != 1 else compute(self, args[0])
        return plain(self, *args, **kwargs) if found is NotImplemented else found

    return MethodType(forward, module)


def probe(function: Callable[..., Any], *numbers: Any) -> Any:
    """What a function makes of a few numbers; None where it takes something else, and so is not what is looked for."""
    try:
        return function(*numbers)
    except Exception:  # whatever code of any family raises for what it was not made for
        return None


def is_near(given: Any, wanted: torch.Tensor) -> bool:
    """Whether a function gave the tensor that is wanted, but for rounding."""
    return (
        isinstance(given, torch.Tensor)
        and given.shape == wanted.shape
        and given.dtype == wanted.dtype
        and given.device == wanted.device
        and torch.allclose(given, wanted, rtol=1e-4, atol=1e-5)
    )


def stand_in(module: nn.Module, **parts: Any) -> nn.Module:
    """A copy of a module that shares all but the named parameters and submodules; its own forward runs on them."""
    copy = type(module).__new__(type(module))
    parameters = {name: part for name, part in parts.items() if name in module._parameters}
    modules = {name: part for name, part in parts.items() if name in module._modules}
    assert len(parameters) + len(modules) == len(parts), "a part that the module has not"
    copy.__dict__ = {
        **module.__dict__,
        "_parameters": {**module._parameters, **parameters},
        "_modules": {**module._modules, **modules},
    }
    return copy
