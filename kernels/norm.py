"""Norms of rows in one pass over memory: root mean square (Zhang & Sennrich 2019) and layer norm (Ba et al. 2016).

A row is computed in float32 and rounded once; transformers rounds to the row's dtype before it multiplies with the
weight.
"""

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

from zinfer.kernels.launching import dependent_options, grid_dependency_wait, launch_dependents, on_device, rows_of

_MOST_WIDTH: Final = 1 << 15  # of a row, which a program holds in registers
_TILE_ELEMENTS: Final = 4096
_ELEMENTS_PER_WARP: Final = 1024
# A few rows do not fill a GPU: each is then spread over threads that load 16 bytes each.
_FEW_ROWS: Final = 512
_FEW_ELEMENTS_PER_WARP: Final = 256


@dataclass(frozen=True)
class NormKind:
    """The kind of norm.

    Attributes:
        eps: added to the mean of the squares.
        offset: added to the weight; 1 in models that store the weight minus 1 (Gemma).
        centred: whether the mean of the row is subtracted first, as in layer norm.
    """

    eps: float
    offset: float = 0.0
    centred: bool = False


def norm(x: torch.Tensor, weight: torch.Tensor, kind: NormKind, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``(x - m) / sqrt(mean((x - m) ** 2) + eps) * (weight + offset) + bias`` over the last dimension.

    By the Triton kernel on a GPU, by `norm_ref` on the CPU, in float64, and for rows of more than 32,768 elements.

    Args:
        x: [..., width].
        weight, bias: [width].
        kind: eps, offset, and whether m is the mean of the row or 0.

    Returns:
        [..., width] in the dtype of x.
    """
    if x.device.type == "cuda" and x.shape[-1] <= _MOST_WIDTH and x.dtype != torch.float64:
        return norm_kernel(x, weight, kind, bias)
    return norm_ref(x, weight, kind, bias)


def norm_ref(x: torch.Tensor, weight: torch.Tensor, kind: NormKind, bias: torch.Tensor | None = None) -> torch.Tensor:
    """As `norm`, in float32, or in float64 for x in float64."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if kind.centred:
        wide = wide - wide.mean(-1, keepdim=True)
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + kind.eps) * (weight.to(wide.dtype) + kind.offset)
    return (wide if bias is None else wide + bias.to(wide.dtype)).to(x.dtype)


def norm_kernel(
    x: torch.Tensor, weight: torch.Tensor, kind: NormKind, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """As `norm`, by the Triton kernel: on a GPU, or on the CPU under Triton's interpreter."""
    width = x.shape[-1]
    flat = rows_of(x)
    out = torch.empty((flat.shape[0], width), dtype=x.dtype, device=x.device)
    columns = triton.next_power_of_2(width)
    is_few = flat.shape[0] <= _FEW_ROWS
    rows = 1 if is_few else max(1, _TILE_ELEMENTS // columns)
    per_warp = _FEW_ELEMENTS_PER_WARP if is_few else _ELEMENTS_PER_WARP
    if out.numel():
        with on_device(x):
            _norm_kernel[(triton.cdiv(flat.shape[0], rows),)](
                flat,
                weight.contiguous(),
                None if bias is None else bias.contiguous(),
                out,
                flat.shape[0],
                flat.stride(0),
                kind.eps,
                kind.offset,
                WIDTH=width,
                COLUMNS=columns,
                ROWS=rows,
                CENTRED=kind.centred,
                **dependent_options(x.device),
                num_warps=max(1, min(16, rows * columns // per_warp)),
            )
    return out.view(x.shape)


@triton.jit(do_not_specialize=["rows"])
def _norm_kernel(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, bias_ptr, out_ptr, rows, row_stride, eps, offset,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, CENTRED: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    launch_dependents(IS_DEPENDENT)
    grid_dependency_wait(IS_DEPENDENT)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    x = tl.load(x_ptr + row[:, None] * row_stride + column[None, :], mask=inside, other=0).to(tl.float32)
    if CENTRED:
        x = tl.where(inside, x - (tl.sum(x, axis=1) / WIDTH)[:, None], 0.0)
    x *= tl.rsqrt(tl.sum(x * x, axis=1) / WIDTH + eps)[:, None]
    x *= (tl.load(weight_ptr + column, mask=column < WIDTH, other=0).to(tl.float32) + offset)[None, :]
    if bias_ptr is not None:
        x += tl.load(bias_ptr + column, mask=column < WIDTH, other=0).to(tl.float32)[None, :]
    tl.store(out_ptr + row[:, None] * WIDTH + column[None, :], x.to(out_ptr.dtype.element_ty), mask=inside)
