"""Mixtures of experts: the middle of all experts' gated MLPs by one kernel.

Their products are transformers' own: for the experts that it keeps in one parameter it chooses torch's grouped product
(``experts_implementation``, by default "grouped_mm"), and calls a method of the experts between the two. In their eager
form, which goes expert by expert, nothing is fused.
"""

from types import MethodType
from typing import Any, Final

import torch
from torch import nn

from zinfer.inject.activations import find_activation, numbers
from zinfer.inject.gates import is_hooked
from zinfer.inject.overlay import Overlay, is_near, probe, stand_in
from zinfer.kernels.activation import Activation
from zinfer.kernels.gated import gated, gated_ref

_METHOD: Final = "_apply_gate"
_WIDTH: Final = 6


def overlay_experts(module: nn.Module) -> Overlay | None:
    """The kernel for experts whose method is ``activation(gate) * up`` over halves of a row; None for any other."""
    plain, function = getattr(type(module), _METHOD, None), getattr(module, "act_fn", None)
    implementation = getattr(getattr(module, "config", None), "_experts_implementation", None)
    if plain is None or _METHOD in module.__dict__ or implementation in (None, "eager"):
        return None
    activation = find_activation(function) if callable(function) and not is_hooked(function) else None
    if activation is None:
        return None
    gate = numbers(3, 4 * _WIDTH).view(-1, _WIDTH)
    up = 0.1 - 0.7 * gate.flip(0)
    if not is_near(probe(plain, stand_in(module), torch.cat((gate, up), dim=-1)), gated_ref(gate, up, activation)):
        return None
    return Overlay(f"gated experts, {activation}", MethodType(_overlaid(activation), module), _METHOD)


def _overlaid(activation: Activation) -> Any:
    def _apply_gate(self: Any, gate_up: torch.Tensor) -> torch.Tensor:  # by its name a pickled copy finds its own
        gate, up = gate_up.chunk(2, dim=-1)
        return gated(gate, up, activation)

    return _apply_gate
