"""Products of one or two tokens by a kernel that pays only in graphs: Python takes longer to launch it than cuBLAS."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from zinfer.inject.overlay import Overlay, own_unless
from zinfer.kernels.gemv import can_multiply, gemv


def overlay_product(module: nn.Module) -> Overlay | None:
    """The kernel for a linear layer, be it torch's or GPT-2's; None for any other module."""
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
    """``x @ weight.T + bias``: by the kernel where it takes them, else as torch does.

    Args:
        weight: one that no kernel has just written: of parameters, or several of them as one.
    """
    is_plain = type(weight) in (nn.Parameter, torch.Tensor)
    return gemv(x, weight, bias) if is_plain and _takes(x, weight) else functional.linear(x, weight, bias)


def make_rows_contiguous(model: nn.Module) -> None:
    """Transpose the weights of GPT-2's linear layers in their own memory, behind views of the same shape.

    Nothing may read that memory by its former layout afterwards, such as copies of a slab.
    """
    layers = (module for module in model.modules() if isinstance(module, Conv1D) and _is_full(module.weight))
    for weight in {id(layer.weight): layer.weight for layer in layers}.values():
        if weight.is_contiguous():
            rows = weight.detach().t().contiguous()
            weight.data = weight.data.view(rows.shape).copy_(rows).t()


def _takes(x: torch.Tensor, weight: torch.Tensor) -> bool:
    return can_multiply(x, weight) and not torch.is_autocast_enabled(x.device.type)


def _is_full(weight: torch.Tensor) -> bool:
    """Whether it is a plain parameter: neither codes nor a tensor that a hook has just computed."""
    return type(weight) is nn.Parameter
