"""Replaces norms that transformers computes in several operators by one kernel each."""

from types import MethodType
from typing import Any, Final

import torch
from torch import nn

from zinfer.inject.overlay import Overlay, is_near, num_inputs, own_unless, probe, stand_in
from zinfer.kernels.norm import NormKind, norm, norm_ref

_EPS_NAMES: Final = ("variance_epsilon", "eps", "epsilon")
_ROWS: Final = 3
_LARGE: Final = 1000.0  # larger than any bound that a norm may clamp to


def overlay_norm(module: nn.Module) -> Overlay | None:
    """Return the kernel for a norm with a weight and no bias; None for other modules.

    torch's own `nn.LayerNorm` is one kernel already (`overlay_layer_norm`).
    """
    weight = module._parameters.get("weight")
    eps = next((value for name in _EPS_NAMES if isinstance(value := getattr(module, name, None), float)), None)
    own = len(module._parameters) == 1 and not module._modules and not isinstance(module, nn.LayerNorm)
    if weight is None or weight.dim() != 1 or eps is None or not own or num_inputs(module) != 1:
        return None
    generator = torch.Generator().manual_seed(0)
    x = 1 + torch.randn(1, _ROWS, weight.shape[0], generator=generator, dtype=torch.float32, device="cpu")
    x[..., 1, :] *= eps**0.5  # small enough to show what eps is added to
    x[..., 2, :] *= _LARGE
    stood_in = torch.rand(weight.shape[0], generator=generator, dtype=torch.float32, device="cpu")
    given = probe(type(module).forward, stand_in(module, weight=stood_in), x)
    kinds = {
        "RMS norm": NormKind(eps),
        "RMS norm of weights about 1": NormKind(eps, offset=1.0),
        "layer norm without bias": NormKind(eps, centred=True),
    }
    found = (name for name, kind in kinds.items() if is_near(given, norm_ref(x, stood_in, kind)))
    name = next(found, None)
    return None if name is None else Overlay(name, _forward(module, kinds[name]))


def overlay_layer_norm(module: nn.Module) -> Overlay | None:
    """Return the kernel for torch's own layer norm with a weight; None for other modules.

    torch's kernel is slower for few tokens, because it runs few programs; but ours takes Python longer to launch.
    """
    if type(module) is not nn.LayerNorm or len(module.normalized_shape) != 1 or module.weight is None:
        return None
    return Overlay("layer norm", _forward(module, NormKind(module.eps, centred=True)))


def _forward(module: nn.Module, kind: NormKind) -> MethodType:
    def compute(self: Any, x: torch.Tensor) -> Any:
        weight = self.weight
        # With a weight of another dtype, transformers' result has that dtype, which the kernel does not imitate.
        if x.dtype != weight.dtype or x.shape[-1:] != weight.shape:
            return NotImplemented
        return norm(x, weight, kind, self._parameters.get("bias"))

    return own_unless(module, compute)
