"""Sums of a tensor over the GPUs of one host, by one kernel on each that reads the others' memory.

Each program puts its elements into a buffer that all ranks map, waits for the programs of its number on the other
ranks, adds what all have put there, and waits for them again before the buffer may be written anew. A wait is that of
torch's symmetric memory (CUDASymmetricMemoryOps.cu): a rank writes 1 where another has 0, which the other turns back
into 0. Sums of a few KB take a launch and two such waits; torch's own kernel knows neither float16 nor one order of
adding on all ranks.
"""

from typing import Final

import torch
import triton
import triton.language as tl

from zinfer.kernels.launching import device_function, on_device

MOST_PROGRAMS: Final = 24
"""Programs of a launch at the most; each has a channel of the signal pads."""
_SMALL_BLOCK: Final = 1024
_LARGE_BLOCK: Final = 4096


def sum_over_peers(x: torch.Tensor, buffers: torch.Tensor, pads: torch.Tensor, channel: int, rank: int) -> None:
    """Replace x by the sum over all ranks: added in float32, in the order of the ranks, so all get the same bits.

    All ranks call it in the same order, on a stream that runs one call after another. It can be captured in a graph.

    Args:
        x: contiguous, of the same shape and dtype on all ranks.
        buffers: addresses of every rank's buffer (int64, [ranks]), mapped on this device, each of x's bytes or more and
            aligned to 16 bytes.
        pads: addresses of every rank's signal pad (int64, [ranks]): int32, zero, [channels, ranks].
        channel: the first of `MOST_PROGRAMS` channels of the pads that nothing else uses.
        rank: this one's number among them.
    """
    block, warps = (_SMALL_BLOCK, 4) if x.numel() <= MOST_PROGRAMS * _SMALL_BLOCK else (_LARGE_BLOCK, 8)
    grid = (min(triton.cdiv(x.numel(), block), MOST_PROGRAMS),)
    with on_device(x):
        _sum_over_peers[grid](
            x, buffers, pads, x.numel(), channel, RANK=rank, SIZE=len(buffers), BLOCK=block, num_warps=warps
        )


@triton.jit
def _sum_over_peers(  # type: ignore[no-untyped-def]
    x_ptr, buffers_ptr, pads_ptr, count, channel, RANK: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    first, step = tl.program_id(0) * BLOCK, tl.num_programs(0) * BLOCK
    places = tl.arange(0, BLOCK)
    own = _pointer(buffers_ptr + RANK, x_ptr.dtype)
    for begin in range(first, count, step):
        inside = begin + places < count
        tl.store(own + begin + places, tl.load(x_ptr + begin + places, mask=inside), mask=inside)
    _meet(pads_ptr, channel, RANK, SIZE)
    for begin in range(first, count, step):
        inside = begin + places < count
        total = tl.zeros((BLOCK,), tl.float32)
        for rank in tl.static_range(SIZE):
            put = _pointer(buffers_ptr + rank, x_ptr.dtype)
            total += tl.load(put + begin + places, mask=inside, other=0, volatile=True).to(tl.float32)
        tl.store(x_ptr + begin + places, total.to(x_ptr.dtype.element_ty), mask=inside)
    _meet(pads_ptr, channel, RANK, SIZE)


@device_function
def _pointer(place, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.multiple_of(tl.load(place).to(KIND), 16)


@device_function
def _meet(pads_ptr, channel, RANK: tl.constexpr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Wait for the programs of this number on all ranks; what they have written before is then visible here."""
    row = (channel + tl.program_id(0)) * SIZE
    tl.debug_barrier()  # all threads have written
    for rank in tl.static_range(SIZE):
        if rank != RANK:
            pad = tl.load(pads_ptr + rank).to(tl.pointer_type(tl.int32))
            while tl.atomic_cas(pad + row + RANK, 0, 1, sem="release", scope="sys") != 0:
                pass
    own = tl.load(pads_ptr + RANK).to(tl.pointer_type(tl.int32))
    for rank in tl.static_range(SIZE):
        if rank != RANK:
            while tl.atomic_cas(own + row + rank, 1, 0, sem="acquire", scope="sys") != 1:
                pass
    tl.debug_barrier()  # no thread reads before
