"""The middle of a gated MLP (Shazeer 2020, arXiv 2002.05202): the activation of the gate times the other product."""

import torch
import triton
import triton.language as tl

from zinfer.kernels.activation import Activation, activate, activated_ref
from zinfer.kernels.launching import (
    dependent_options,
    grid_dependency_wait,
    launch_dependents,
    on_device,
    rows_of,
    tile_for,
)


def gated(gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """``activation(gate) * up``, in float32 and rounded once: by the Triton kernel on a GPU, else and in float64
    by `gated_ref`.

    Args:
        gate, up: [..., width], rows of both may lie apart.

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


@triton.jit
def _gated_kernel(  # type: ignore[no-untyped-def]
    gate_ptr, up_ptr, out_ptr, width, num_blocks, gate_row, up_row,
    ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    launch_dependents(IS_DEPENDENT)
    grid_dependency_wait(IS_DEPENDENT)
    # Programs that run together read what lies together: across rows it took 5 % longer.
    row = (tl.program_id(0) // num_blocks).to(tl.int64)
    column = tl.program_id(0) % num_blocks * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    x = tl.load(gate_ptr + row * gate_row + column, mask=inside, other=0).to(tl.float32)
    up = tl.load(up_ptr + row * up_row + column, mask=inside, other=0).to(tl.float32)
    x = activate(x, ACTIVATION) * up
    tl.store(out_ptr + row * width + column, x.to(out_ptr.dtype.element_ty), mask=inside)
