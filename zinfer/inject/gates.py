"""Gated MLPs: the activation of one product times the other, by one kernel between three products."""

from typing import Any, Final

import torch
from torch import nn

from zinfer.inject.overlay import Overlay, is_near, probe, stand_in
from zinfer.kernels.gated import ACTIVATIONS, Activation, activated_ref, gated, gated_ref

_APART: Final = ("gate_proj", "up_proj", "down_proj")
_JOINED: Final = ("gate_up_proj", "down_proj")
_ACTIVATION_NAMES: Final = ("act_fn", "activation_fn")
_WIDTH: Final = 6  # of what the stand-ins make


class _Line(nn.Module):
    """Stands for a product: several lines through the same numbers, side by side."""

    def __init__(self, *lines: tuple[float, float]) -> None:
        super().__init__()
        self._lines = lines

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([slope * x + height for slope, height in self._lines], dim=-1)


_GATE, _UP, _DOWN = (1.3, 0.2), (-0.7, 0.1), (2.0, -0.3)


def overlay_gate(module: nn.Module) -> Overlay | None:
    """The kernel for a module that is ``down(activation(gate(x)) * up(x))``; None for any other."""
    names = next((names for names in (_APART, _JOINED) if all(name in module._modules for name in names)), None)
    function = next((found for name in _ACTIVATION_NAMES if (found := getattr(module, name, None)) is not None), None)
    activation = _activation(function) if callable(function) else None
    if names is None or activation is None:
        return None
    x = torch.linspace(-3, 3, 4 * _WIDTH).view(1, 4, _WIDTH)
    lines = {"gate_proj": (_GATE,), "up_proj": (_UP,), "gate_up_proj": (_GATE, _UP), "down_proj": (_DOWN,)}
    copy = stand_in(module, **{name: _Line(*lines[name]) for name in names})
    wanted = _Line(_DOWN)(gated_ref(_Line(_GATE)(x), _Line(_UP)(x), activation))
    if not is_near(probe(type(module).forward, copy, x), wanted):
        return None
    overlaid = _apart if names is _APART else _joined
    return Overlay(f"gated MLP, {activation}", overlaid(module, activation))


def _activation(function: Any) -> Activation | None:
    """Which one a module computes with."""
    x = torch.linspace(-6, 6, 97)
    given = probe(function, x)
    return next((name for name in ACTIVATIONS if is_near(given, activated_ref(x, name))), None)


def _apart(module: Any, activation: Activation) -> Any:
    def forward(x: torch.Tensor) -> Any:
        return module.down_proj(gated(module.gate_proj(x), module.up_proj(x), activation))

    return forward


def _joined(module: Any, activation: Activation) -> Any:
    def forward(hidden_states: torch.Tensor) -> Any:
        gate, up = module.gate_up_proj(hidden_states).chunk(2, dim=-1)
        return module.down_proj(gated(gate, up, activation))

    return forward
