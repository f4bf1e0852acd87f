"""Mixtures of experts: all experts' products in two launches, without waiting for the device.

Of transformers' own implementations, one waits for the device in each expert, one copies the weights of every chosen
expert, and torch's grouped product supports only bfloat16 on a GPU, and would dequantize all experts.
"""

from collections.abc import Callable
from types import MethodType, SimpleNamespace
from typing import Any, Final

import torch
from torch import nn

from zinfer.inject.overlay import Overlay, is_near, probe, stand_in
from zinfer.kernels.expert_routing import Groups
from zinfer.kernels.grouped_linear import ExpertWeights, can_group, grouped_linear
from zinfer.weights.parameter import QuantizedParameter

GROUPED_EXPERTS: Final = "grouped experts"

_TRANSFORMERS_CHOICE: Final = ("grouped_mm", "batched_mm")  # the default, and the one while `generate` decodes
_TRAITS: Final = ("has_gate", "has_bias", "is_transposed", "num_experts", "config")
_NUM_EXPERTS, _WIDTH, _INNER = 4, 6, 10
_CHOSEN: Final = ((0, 2), (3, 0), (2, 3), (0, 3), (2, 0))  # not the second


def overlay_grouped_experts(module: nn.Module) -> Overlay | None:
    """Return the grouped product for experts whose matrices are stacked in parameters; None for other modules."""
    if any(not hasattr(module, name) for name in _TRAITS) or getattr(module, "has_post_expert_norm", False):
        return None
    if getattr(module.config, "_experts_implementation", None) not in _TRANSFORMERS_CHOICE:
        return None
    parts = _parts(module)
    if any(name not in module._parameters for name in parts):
        return None
    copy = stand_in(module, **parts)
    copy.__dict__ |= {"num_experts": _NUM_EXPERTS, "config": SimpleNamespace(_experts_implementation="eager")}
    x = torch.linspace(-1, 2, len(_CHOSEN) * _WIDTH, dtype=torch.float32, device="cpu").view(-1, _WIDTH).sin()
    chosen = torch.tensor(_CHOSEN, device="cpu")
    weights = torch.linspace(0.9, 0.1, chosen.numel(), dtype=torch.float32, device="cpu").view(chosen.shape)
    wanted = probe(type(module).forward, copy, x, chosen, weights)
    if wanted is None or not is_near(probe(_computed, copy, x, chosen, weights), wanted):
        return None
    return Overlay(GROUPED_EXPERTS, MethodType(_overlaid(type(module).forward), module))


def _parts(module: Any) -> dict[str, nn.Parameter]:
    """Return parameters of a few small experts, to replace the module's."""
    first = "gate_up_proj" if module.has_gate else "up_proj"
    shapes = {first: (2 * _INNER if module.has_gate else _INNER, _WIDTH), "down_proj": (_WIDTH, _INNER)}
    parts = {}
    for name, (rows, columns) in shapes.items():
        matrix = (columns, rows) if module.is_transposed else (rows, columns)
        parts[name] = _numbers(_NUM_EXPERTS, *matrix)
        if module.has_bias:
            parts[f"{name}_bias"] = _numbers(_NUM_EXPERTS, rows)
    return parts


def _numbers(*shape: int) -> nn.Parameter:
    count = torch.Size(shape).numel()
    numbers = torch.arange(1, count + 1, dtype=torch.float32, device="cpu").mul(1.7).sin().view(shape)
    return nn.Parameter(numbers, requires_grad=False)


def _overlaid(plain: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 3 and not kwargs and _is_ours(self, args[0]):
            return _computed(self, *args)
        return plain(self, *args, **kwargs)

    outside: Callable[..., Any] = torch.compiler.disable(forward)  # type: ignore[no-untyped-call]
    return outside


def _is_ours(module: Any, x: torch.Tensor) -> bool:
    """Return whether the kernel supports these tokens, and the config names no other implementation."""
    is_left = module.config._experts_implementation not in _TRANSFORMERS_CHOICE
    if is_left or getattr(module, "_is_expert_parallel", False) or torch.is_autocast_enabled(x.device.type):
        return False
    parameters = [getattr(module, name) for name in _names(module)]
    stored = [_stored(parameter, module.is_transposed) for parameter in parameters]
    return all(each is not None and each.dtype == x.dtype and can_group(each) for each in stored)


def _computed(module: Any, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the experts' weighted sum for x [tokens, width]; ``chosen`` and ``weights`` are [tokens, experts of each].

    Rounds and sums like `grouped_mm_experts_forward` in transformers' integrations/moe.py.
    """
    groups = Groups.of(chosen, module.num_experts)
    first, second = _names(module)
    made = _product(module, first, x, groups)
    made = module._apply_gate(made) if module.has_gate else module.act_fn(made)
    made = _product(module, second, made, groups) * weights.reshape(-1, 1)
    return made.view(*chosen.shape, made.shape[-1]).sum(dim=1).to(x.dtype)


def _product(module: Any, name: str, x: torch.Tensor, groups: Groups) -> torch.Tensor:
    stored = _stored(getattr(module, name), module.is_transposed)
    assert stored is not None
    return grouped_linear(x, stored, groups, getattr(module, f"{name}_bias") if module.has_bias else None)


def _names(module: Any) -> tuple[str, str]:
    return "gate_up_proj" if module.has_gate else "up_proj", "down_proj"


def _stored(parameter: torch.Tensor, is_transposed: bool) -> ExpertWeights | None:
    """Return the experts' matrices as the product needs them; None if it does not support them."""
    if isinstance(parameter, QuantizedParameter):
        return parameter.matrix if parameter.dim() == 3 and parameter.transposed == is_transposed else None
    if type(parameter) not in (nn.Parameter, torch.Tensor):
        return None
    return parameter.detach().transpose(1, 2) if is_transposed else parameter.detach()
