"""Replaces activations of several kernels (GPT-2's, BLOOM's) by one; finds out which activation a function computes."""

from types import MethodType
from typing import Any, Final

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from zinfer.inject.overlay import Overlay, is_near, num_inputs, own_unless, probe, stand_in
from zinfer.kernels.activation import ACTIVATIONS, Activation, activated, activated_ref

_LARGE: Final = (7.0, 12.0, 30.0, 100.0, 300.0, 1000.0)  # larger than any bound that an activation may clamp to


def overlay_activation(module: nn.Module) -> Overlay | None:
    """Return the kernel for an activation module that launches several torch kernels; None for other modules."""
    if module._parameters or module._buffers or module._modules or num_inputs(module) != 1:
        return None
    forward = MethodType(type(module).forward, stand_in(module))
    activation = find_activation(forward)
    if activation is None or _num_kernels(forward) < 2:
        return None

    def compute(self: Any, x: torch.Tensor) -> Any:
        # Under autocast torch chooses the result's dtype.
        return NotImplemented if torch.is_autocast_enabled(x.device.type) else activated(x, activation)

    return Overlay(f"activation, {activation}", own_unless(module, compute))


def find_activation(function: Any) -> Activation | None:
    """Return the activation that a function computes; None for modules with hooks, which the kernel would not call."""
    if isinstance(function, nn.Module) and (function._forward_hooks or function._forward_pre_hooks):
        return None
    x = numbers(6, 97)
    given = probe(function, x)
    return next((name for name in ACTIVATIONS if is_near(given, activated_ref(x, name))), None)


def numbers(end: float, count: int) -> torch.Tensor:
    """Return ``count`` numbers from ``-end`` to ``end``, and a few large ones of both signs."""
    large = torch.tensor(_LARGE, dtype=torch.float32, device="cpu")
    return torch.cat((torch.linspace(-end, end, count, dtype=torch.float32, device="cpu"), large, -large))


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts calls of torch operators."""

    num_calls: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_calls += 1
        return func(*args, **(kwargs or {}))


def _num_kernels(function: Any) -> int:
    x = numbers(6, 97)
    counting = _Counting()  # type: ignore[no-untyped-call]
    with counting:
        function(x)
    return counting.num_calls
