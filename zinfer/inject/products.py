"""Products of one or two tokens by a kernel that is faster only in graphs: Python launches cuBLAS faster."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from zinfer.inject.overlay import Overlay, own_unless
from zinfer.kernels.gemv import can_multiply, gemv


def overlay_product(module: nn.Module) -> Overlay | None:
    """Return the kernel for a linear layer of torch or GPT-2; None for other modules."""
    if type(module) not in (nn.Linear, Conv1D):
        return None
    transposed = type(module) is Conv1D

    def compute(self: Any, x: torch.Tensor) -> Any:
        weight = self.weight
        if not _is_full(weight):
            return NotImplemented
        rows = weight.T if transposed else weight
        return gemv(x, rows, self.bias) if _takes(x, rows) else NotImplemented

    return Overlay("product of few tokens", own_unless(module, compute))


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``x @ weight.T + bias``, by the kernel if it supports the operands, else by torch.

    Args:
        weight: one that no kernel has just written: a parameter, or several adjacent ones as one matrix.
    """
    is_plain = type(weight) in (nn.Parameter, torch.Tensor)
    return gemv(x, weight, bias) if is_plain and _takes(x, weight) else functional.linear(x, weight, bias)


def make_rows_contiguous(model: nn.Module) -> None:
    """Transpose the weights of GPT-2's linear layers in place; the parameters become views of the same shape.

    Afterwards nothing may read that memory in its old layout, as copies of a slab would.
    """
    layers = (module for module in model.modules() if isinstance(module, Conv1D) and _is_full(module.weight))
    for weight in {id(layer.weight): layer.weight for layer in layers}.values():
        if weight.is_contiguous():
            rows = weight.detach().t().contiguous()
            weight.data = weight.data.view(rows.shape).copy_(rows).t()


def _takes(x: torch.Tensor, weight: torch.Tensor) -> bool:
    return can_multiply(x, weight) and not torch.is_autocast_enabled(x.device.type)


def _is_full(weight: torch.Tensor) -> bool:
    """Return whether it is a plain parameter: not quantized, and not computed by a hook."""
    return type(weight) is nn.Parameter
