"""Gated MLPs: one kernel multiplies the activation of one product with the other product.

Mixtures of experts have gates too: for experts in one parameter transformers uses torch's grouped product
(``experts_implementation``, by default "grouped_mm"), and calls a method of the experts between the two products. The
eager implementation, which loops over experts, is not fused.
"""

from types import MethodType
from typing import Any, Final

import torch
from torch import nn

from zinfer.inject.activations import find_activation, numbers
from zinfer.inject.overlay import Overlay, is_near, own_unless, probe, stand_in
from zinfer.kernels.activation import gated, gated_ref

_APART: Final = ("gate_proj", "up_proj", "down_proj")
_JOINED: Final = ("gate_up_proj", "down_proj")
_ACTIVATION_NAMES: Final = ("act_fn", "activation_fn")
_EXPERTS_METHOD: Final = "_apply_gate"
_WIDTH: Final = 6  # of the stand-ins' outputs


class _Line(nn.Module):
    """Stands in for a product: concatenates several linear functions of the input."""

    def __init__(self, *lines: tuple[float, float]) -> None:
        super().__init__()
        self._lines = lines

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([slope * x + height for slope, height in self._lines], dim=-1)


_GATE, _UP, _DOWN = (1.3, 0.2), (-0.7, 0.1), (2.0, -0.3)


def overlay_gate(module: nn.Module) -> Overlay | None:
    """Return the kernel for a module that is ``down(activation(gate(x)) * up(x))``; None for other modules."""
    names = next((names for names in (_APART, _JOINED) if all(name in module._modules for name in names)), None)
    function = next((found for name in _ACTIVATION_NAMES if (found := getattr(module, name, None)) is not None), None)
    activation = find_activation(function)
    if names is None or activation is None:
        return None
    x = numbers(3, 4 * _WIDTH).view(1, -1, _WIDTH)
    lines = {"gate_proj": (_GATE,), "up_proj": (_UP,), "gate_up_proj": (_GATE, _UP), "down_proj": (_DOWN,)}
    copy = stand_in(module, **{name: _Line(*lines[name]) for name in names})
    wanted = _Line(_DOWN)(gated_ref(_Line(_GATE)(x), _Line(_UP)(x), activation))
    if not is_near(probe(type(module).forward, copy, x), wanted):
        return None

    def apart(self: Any, x: Any) -> Any:
        return self.down_proj(gated(self.gate_proj(x), self.up_proj(x), activation))

    def joined(self: Any, x: Any) -> Any:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(gated(gate, up, activation))

    return Overlay(f"gated MLP, {activation}", own_unless(module, apart if names is _APART else joined))


def overlay_experts(module: nn.Module) -> Overlay | None:
    """Return the kernel for experts whose method is ``activation(gate) * up`` of halves of a row; else None."""
    plain, function = getattr(type(module), _EXPERTS_METHOD, None), getattr(module, "act_fn", None)
    implementation = getattr(getattr(module, "config", None), "_experts_implementation", None)
    if plain is None or _EXPERTS_METHOD in module.__dict__ or implementation in (None, "eager"):
        return None
    activation = find_activation(function)
    if activation is None:
        return None
    gate = numbers(3, 4 * _WIDTH).view(-1, _WIDTH)
    up = 0.1 - 0.7 * gate.flip(0)
    if not is_near(probe(plain, stand_in(module), torch.cat((gate, up), dim=-1)), gated_ref(gate, up, activation)):
        return None

    def _apply_gate(self: Any, gate_up: torch.Tensor) -> torch.Tensor:  # this name lets pickled copies find their own
        gate, up = gate_up.chunk(2, dim=-1)
        return gated(gate, up, activation)

    return Overlay(f"gated experts, {activation}", MethodType(_apply_gate, module), _EXPERTS_METHOD)
