"""x with its columns in the order in which words of four codes are widened: first codes, second ones, and so on."""

from typing import Final

import torch
import triton
import triton.language as tl

from zinfer.kernels.launching import on_device

_BLOCK: Final = 1024
_WARPS: Final = 4


def in_quarters(x: torch.Tensor) -> torch.Tensor:
    """x [tokens, columns] as [4, tokens, columns / 4]: columns 0, 4, 8 and on, then 1, 5, 9 and on.

    Args:
        x: contiguous, of two bytes an element, with whole fours of columns; on a GPU, or under Triton's interpreter.
    """
    tokens, columns = x.shape
    out = torch.empty((4, tokens, columns // 4), dtype=x.dtype, device=x.device)
    count = out[0].numel()
    if count:
        words = (x.clone() if x.data_ptr() % 8 else x).view(torch.int64)
        with on_device(x):
            _quarters_kernel[(triton.cdiv(count, _BLOCK),)](
                words, out.view(torch.int16), count, BLOCK=_BLOCK, num_warps=_WARPS
            )
    return out


@triton.jit(do_not_specialize=["count"])
def _quarters_kernel(words_ptr, out_ptr, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Some fours of columns, each a word of 64 bits."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    words = tl.load(words_ptr + place, mask=inside, other=0)
    for part in tl.static_range(4):
        tl.store(out_ptr + part * count.to(tl.int64) + place, (words >> 16 * part).to(tl.int16), mask=inside)
