"""Quantizes activations token by token, each with its own scale: to INT8, or to e4m3 floating point.

Zeros have scale 0; a token with an infinity or NaN has the scale NaN, so that its products are NaN too.
"""

from typing import Final

import torch
import triton
import triton.language as tl

from zinfer.kernels.launching import on_device

_LAST: Final = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The largest code of each dtype."""
_LEAST = tl.constexpr(2.0**-100)  # tokens of smaller magnitude count as zeros, since last / magnitude may overflow
_TOKEN_BLOCK: Final = 4096
_TOKEN_WARPS: Final = 8


def quantize_tokens_ref(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize tokens, in plain torch.

    Args:
        x: [tokens, columns].
        dtype: int8 or float8_e4m3fn; codes are rounded to even.

    Returns:
        Codes of x's shape, and scales [tokens] in float32; a value is about its code times its token's scale.
    """
    values, last = x.float(), _LAST[dtype]
    largest = values.abs().amax(dim=1, keepdim=True) if x.shape[1] else values.new_zeros(x.shape[0], 1)
    steps = torch.where(largest > _LEAST.value, torch.full_like(largest, last) / largest, 0)
    scaled = values * steps
    codes = (scaled if dtype == torch.float8_e4m3fn else scaled.round()).clamp(-last, last).to(dtype)
    return codes, (largest / torch.full_like(largest, last)).squeeze(1) + (values * 0).sum(dim=1)


def quantize_tokens_kernel(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """As `quantize_tokens_ref`, by the Triton kernel; FP8 needs a GPU of compute capability 8.9."""
    x = x.contiguous()
    codes = torch.empty(x.shape, dtype=dtype, device=x.device)
    scales = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    block = min(_TOKEN_BLOCK, triton.next_power_of_2(x.shape[1]))
    with on_device(x):
        _quantize_tokens[(x.shape[0],)](
            x,
            codes,
            scales,
            x.shape[1],
            LAST=_LAST[dtype],
            ROUNDS=dtype == torch.int8,
            BLOCK=block,
            num_warps=_TOKEN_WARPS,
            enable_fp_fusion=False,  # fusing a product into the addition that rounds would skip its own rounding
        )
    return codes, scales


@triton.jit
def _quantize_tokens(  # type: ignore[no-untyped-def]
    x_ptr, codes_ptr, scales_ptr, columns, LAST: tl.constexpr, ROUNDS: tl.constexpr, BLOCK: tl.constexpr
):
    """Quantize one token: its largest magnitude, then its codes, rounded to even like torch."""
    begin = tl.program_id(0).to(tl.int64) * columns
    largest = tl.zeros((BLOCK,), tl.float32)
    nothing = tl.zeros((BLOCK,), tl.float32)  # or NaN if the token has an infinity or NaN, which a maximum loses
    for offset in range(0, columns, BLOCK):
        place = offset + tl.arange(0, BLOCK)
        value = tl.load(x_ptr + begin + place, mask=place < columns, other=0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(value))
        nothing += value * 0
    top = tl.max(largest, axis=0)
    step = tl.where(top > _LEAST, tl.div_rn(LAST, tl.maximum(top, _LEAST)), 0.0)
    tl.store(scales_ptr + tl.program_id(0), tl.div_rn(top, LAST) + tl.sum(nothing, axis=0))
    for offset in range(0, columns, BLOCK):
        place = offset + tl.arange(0, BLOCK)
        value = tl.load(x_ptr + begin + place, mask=place < columns, other=0).to(tl.float32) * step
        if ROUNDS:
            value = (value + 12582912.0) - 12582912.0  # 1.5 * 2**23: float32 has no fraction bits there
        value = tl.minimum(tl.maximum(value, -LAST), LAST)
        tl.store(codes_ptr + begin + place, value.to(codes_ptr.dtype.element_ty), mask=place < columns)
