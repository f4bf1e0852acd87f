"""Reads of small tensors in pinned host memory by the device's cores instead of its copy engine.

The engine may go on with one stream for as long as that has work, so a small copy on another one waits for all slabs
that are on their way. A kernel's reads go between theirs.
"""

from typing import Final

import torch
import triton
import triton.language as tl

from zinfer.kernels.launching import on_device

_BLOCK: Final = 1024
_WORD: Final = torch.int32


def read_pinned(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy on the device, by the Triton kernel: on a GPU, or on the CPU under Triton's interpreter.

    Args:
        host: contiguous, of a dtype of 4 or 8 bytes; the caller keeps it until the kernel has ended.
    """
    assert host.is_contiguous()
    assert host.itemsize % _WORD.itemsize == 0
    out = torch.empty(host.shape, dtype=host.dtype, device=device)
    if out.numel():
        words, found = host.view(-1).view(_WORD), out.view(-1).view(_WORD)
        with on_device(out):
            _read_kernel[(triton.cdiv(len(words), _BLOCK),)](words, found, len(words), BLOCK=_BLOCK)
    return out


@triton.jit(do_not_specialize=["count"])
def _read_kernel(host_ptr, out_ptr, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    tl.store(out_ptr + place, tl.load(host_ptr + place, mask=inside), mask=inside)
