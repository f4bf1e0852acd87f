"""Activations in one pass over memory: GELU (Hendrycks & Gimpel 2016, arXiv 1606.08415) with erf, tanh or a sigmoid,
SiLU, ReLU; and the middle of a gated MLP (Shazeer 2020, arXiv 2002.05202), an activation times another product.
"""

import math
from typing import Final, Literal, TypeAlias, get_args

import torch
import triton
import triton.language as tl
from torch.nn import functional

from zinfer.kernels.launching import (
    dependent_options,
    device_function,
    grid_dependency_wait,
    launch_dependents,
    launch_flat,
    on_device,
    rows_of,
    tile_for,
)

Activation: TypeAlias = Literal["silu", "gelu", "gelu_tanh", "gelu_quick", "relu"]
ACTIVATIONS: Final[tuple[Activation, ...]] = get_args(Activation)


def activated(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """The activation of each element, in float32 and rounded once: by the Triton kernel on a GPU, else and in float64
    by `activated_ref`.

    Args:
        x: of any shape.

    Returns:
        As x; contiguous from the kernel.
    """
    if x.device.type == "cuda" and x.dtype != torch.float64:
        return activated_kernel(x, activation)
    return activated_ref(x, activation)


def activated_ref(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """As `activated`, in float32, or in float64 for float64."""
    return _wide(x.to(torch.promote_types(x.dtype, torch.float32)), activation).to(x.dtype)


def _wide(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    if activation == "silu":
        return functional.silu(x)
    if activation == "gelu_quick":
        return x * torch.sigmoid(1.702 * x)
    if activation == "relu":
        return functional.relu(x)
    # 1 + erf and 1 + tanh would lose all precision for a very negative x.
    if activation == "gelu_tanh":
        return x * torch.sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x * x * x))
    tail: torch.Tensor = torch.special.erfc(-math.sqrt(0.5) * x)
    return 0.5 * x * tail


def activated_kernel(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """As `activated`, by the Triton kernel: on a GPU, or on the CPU under Triton's interpreter."""
    x = x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch_flat(_activation_kernel, out, x, ACTIVATION=activation)
    return out


def gated(gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """``activation(gate) * up``, in float32 and rounded once: by the Triton kernel on a GPU, else and in float64
    by `gated_ref`.

    Args:
        gate, up: [..., width]; rows may be strided.

    Returns:
        [..., width], contiguous, in the dtype of gate.
    """
    if gate.device.type == "cuda" and gate.dtype != torch.float64:
        return gated_kernel(gate, up, activation)
    return gated_ref(gate, up, activation)


def gated_ref(gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """As `gated`, in float32, or in float64 for float64."""
    wide = gate.to(torch.promote_types(gate.dtype, torch.float32))
    return (activated_ref(wide, activation) * up.to(wide.dtype)).to(gate.dtype)


def gated_kernel(gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """As `gated`, by the Triton kernel: on a GPU, or on the CPU under Triton's interpreter."""
    assert gate.shape == up.shape
    width = gate.shape[-1]
    rows = rows_of(gate), rows_of(up)
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if out.numel():
        block, warps = tile_for(out.numel())
        with on_device(gate):
            num_blocks = triton.cdiv(width, block)
            _gated_kernel[(rows[0].shape[0] * num_blocks,)](
                *rows,
                out,
                width,
                num_blocks,
                rows[0].stride(0),
                rows[1].stride(0),
                ACTIVATION=activation,
                BLOCK=block,
                **dependent_options(gate.device),
                num_warps=warps,
            )
    return out


@device_function
def _erfc(z):  # type: ignore[no-untyped-def]
    """Return erfc(x) for x >= 0, with a relative error of 1.2e-7 (Press et al., Numerical Recipes, 6.2, erfcc)."""
    t = 1 / (1 + 0.5 * z)
    p = -0.82215223 + t * 0.17087277
    p = 1.48851587 + t * p
    p = -1.13520398 + t * p
    p = 0.27886807 + t * p
    p = -0.18628806 + t * p
    p = 0.09678418 + t * p
    p = 0.37409196 + t * p
    p = 1.00002368 + t * p
    return t * tl.exp(-z * z - 1.26551223 + t * p)


@device_function
def activate(x, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the activation of float32 numbers in registers."""
    if ACTIVATION == "silu":
        x = x * tl.sigmoid(x)
    elif ACTIVATION == "gelu":
        tail = 0.5 * _erfc(tl.abs(x) * 0.7071067811865476)
        x *= tl.where(x < 0, tail, 1 - tail)
    elif ACTIVATION == "gelu_tanh":  # (1 + tanh(u)) / 2 is the sigmoid of 2 u
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif ACTIVATION == "gelu_quick":
        x = x * tl.sigmoid(1.702 * x)
    else:
        x = tl.where(x < 0, 0.0, x)  # a maximum would hide a NaN
    return x


@triton.jit
def _activation_kernel(  # type: ignore[no-untyped-def]
    x_ptr, out_ptr, count, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, IS_DEPENDENT: tl.constexpr
):
    launch_dependents(IS_DEPENDENT)
    grid_dependency_wait(IS_DEPENDENT)
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + place, mask=place < count, other=0).to(tl.float32)
    tl.store(out_ptr + place, activate(x, ACTIVATION).to(out_ptr.dtype.element_ty), mask=place < count)


@triton.jit
def _gated_kernel(  # type: ignore[no-untyped-def]
    gate_ptr, up_ptr, out_ptr, width, num_blocks, gate_row, up_row,
    ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    launch_dependents(IS_DEPENDENT)
    grid_dependency_wait(IS_DEPENDENT)
    # Programs that run together read adjacent memory: across rows it took 5 % longer.
    row = (tl.program_id(0) // num_blocks).to(tl.int64)
    column = tl.program_id(0) % num_blocks * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    x = tl.load(gate_ptr + row * gate_row + column, mask=inside, other=0).to(tl.float32)
    up = tl.load(up_ptr + row * up_row + column, mask=inside, other=0).to(tl.float32)
    x = activate(x, ACTIVATION) * up
    tl.store(out_ptr + row * width + column, x.to(out_ptr.dtype.element_ty), mask=inside)
