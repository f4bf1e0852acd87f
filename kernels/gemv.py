"""Multiplies one or two tokens with a 16-bit matrix, at the speed of memory.

Each program computes two rows and adds in its own registers. Sums are float32 in a fixed order: the same arguments give
the same bits. Launches are dependent: the first elements are loaded while the previous kernel still runs.
"""

from typing import Final

import torch
import triton
import triton.language as tl

from zinfer.kernels.launching import (
    INTERPRETED,
    dependent_options,
    grid_dependency_wait,
    launch_dependents,
    on_device,
    rows_of,
)

MOST_TOKENS: Final = 2
_DTYPES: Final = (torch.float16, torch.bfloat16)
# The fastest, or nearly so, of those timed on an H200 for the matrices of Llama 3 8B and GPT-2 XL's head.
_ROWS: Final = 2
_COLUMNS: Final = 1024
_WARPS: Final = 1


def can_multiply(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether the kernel supports them: few tokens, one 16-bit dtype, on a GPU or under the interpreter."""
    return (
        x.dtype == weight.dtype
        and x.dtype in _DTYPES
        and 0 < x.numel() <= MOST_TOKENS * x.shape[-1]
        and (x.device.type == "cuda" or INTERPRETED)
        and weight.is_contiguous()
    )


def gemv(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``x @ weight.T + bias``, sums in float32.

    No kernel may have just written the weight (`launching.grid_dependency_wait`).

    Args:
        x: [..., columns], few vectors (see `can_multiply`).
        weight: [rows, columns], contiguous.
        bias: [rows].

    Returns:
        [..., rows] in the dtype of x.
    """
    rows, columns = weight.shape
    flat = rows_of(x)
    out = torch.empty((flat.shape[0], rows), dtype=x.dtype, device=x.device)
    if out.numel():
        with on_device(x):
            _gemv_kernel[(triton.cdiv(rows, _ROWS),)](
                flat,
                weight,
                None if bias is None else bias.contiguous(),
                out,
                rows,
                columns,
                flat.stride(0),
                TOKENS=flat.shape[0],
                ROWS=_ROWS,
                COLUMNS=_COLUMNS,
                **dependent_options(x.device),
                num_warps=_WARPS,
            )
    return out.view(*x.shape[:-1], rows)


@triton.jit
def _gemv_kernel(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, bias_ptr, out_ptr, rows, columns, x_stride,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Compute some rows for all tokens; each column of a step has its own sum until the end."""
    launch_dependents(IS_DEPENDENT)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    in_rows = (row < rows)[:, None]
    ptrs = weight_ptr + row.to(tl.int64)[:, None] * columns + column[None, :]
    weight = tl.load(ptrs, mask=in_rows & (column < columns)[None, :], other=0).to(tl.float32)
    grid_dependency_wait(IS_DEPENDENT)
    sums = ()
    for token in tl.static_range(TOKENS):
        x = tl.load(x_ptr + token * x_stride + column, mask=column < columns, other=0).to(tl.float32)
        sums += (weight * x[None, :],)  # type: ignore[assignment]
    for begin in range(COLUMNS, columns, COLUMNS):
        inside = column < columns - begin
        weight = tl.load(ptrs + begin, mask=in_rows & inside[None, :], other=0).to(tl.float32)
        added = ()
        for token in tl.static_range(TOKENS):
            x = tl.load(x_ptr + token * x_stride + begin + column, mask=inside, other=0).to(tl.float32)
            added += (sums[token] + weight * x[None, :],)  # type: ignore[assignment]
        sums = added
    for token in tl.static_range(TOKENS):
        value = tl.sum(sums[token], axis=1)
        if bias_ptr is not None:
            value += tl.load(bias_ptr + row, mask=row < rows, other=0).to(tl.float32)
        tl.store(out_ptr + token * rows + row, value.to(out_ptr.dtype.element_ty), mask=row < rows)
