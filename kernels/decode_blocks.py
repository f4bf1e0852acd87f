"""Decodes blocks of ggml's types, in which GGUF files store weights, on the device.

A block holds the codes of 32 or 256 values of a row and the scales that they share, without alignment; where, the
layouts below say (ggml-common.h). Each value reads its own bytes, which neighbours find in the first cache. The torch
twin is `zinfer.weights.formats.gguf.decode`, whose values these are, computed in float32 and rounded once.
"""

from functools import cache
from typing import Final

import torch
import triton
import triton.language as tl

from zinfer.kernels.launching import on_device

KINDS: Final = {
    "Q4_0": (2, 32, 18),
    "Q4_1": (3, 32, 20),
    "Q5_0": (6, 32, 22),
    "Q5_1": (7, 32, 24),
    "Q8_0": (8, 32, 34),
    "Q2_K": (10, 256, 84),
    "Q3_K": (11, 256, 110),
    "Q4_K": (12, 256, 144),
    "Q5_K": (13, 256, 176),
    "Q6_K": (14, 256, 210),
    "IQ4_NL": (20, 32, 18),
    "IQ4_XS": (23, 256, 136),
    "MXFP4": (39, 32, 17),
}
"""ggml's number of each type, and the values and bytes of a block."""
IQ4_LEVELS: Final = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""What the codes of IQ4_NL and IQ4_XS stand for (ggml's kvalues_iq4nl)."""
E2M1_LEVELS: Final = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""What the codes of MXFP4 stand for, doubled (ggml's kvalues_mxfp4)."""
_LEVELS: Final = {20: IQ4_LEVELS, 23: IQ4_LEVELS, 39: E2M1_LEVELS}
_TILE_VALUES: Final = 1024
_WARPS: Final = 4


def decode_blocks(kind: str, blocks: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Fill and return ``out``, contiguous and of as many values as the blocks hold.

    Args:
        kind: a name of `KINDS`.
        blocks: uint8, contiguous, on the device of ``out``: a GPU, or the CPU under Triton's interpreter.
    """
    number, values, nbytes = KINDS[kind]
    count = blocks.numel() // nbytes
    assert blocks.is_contiguous()
    assert out.is_contiguous()
    assert out.numel() == count * values
    if count:
        per_program = _TILE_VALUES // values
        with on_device(out):
            _decode_blocks_kernel[(triton.cdiv(count, per_program),)](
                blocks,
                level_table(_LEVELS.get(number, E2M1_LEVELS), out.device),
                out,
                count,
                KIND=number,
                VALUES=values,
                BYTES=nbytes,
                BLOCKS=per_program,
                num_warps=_WARPS,
                enable_fp_fusion=False,  # the twin rounds after each operation
            )
    return out


@cache
def level_table(levels: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return levels on a device, float32; kept, because a graph's capture may not copy them there."""
    return torch.tensor(levels, dtype=torch.float32, device=device)


@triton.jit
def _octet(base, place, mask):  # type: ignore[no-untyped-def]
    return tl.load(base + place, mask=mask, other=0).to(tl.int32)


@triton.jit
def _signed(octet):  # type: ignore[no-untyped-def]
    return octet - ((octet & 128) << 1)


@triton.jit
def _half(base, place: tl.constexpr, mask):  # type: ignore[no-untyped-def]
    bits = _octet(base, place, mask) | _octet(base, place + 1, mask) << 8
    return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _nibble(base, place, high, mask):  # type: ignore[no-untyped-def]
    """The lower four bits of a byte, or the upper ones where ``high`` is 1."""
    return _octet(base, place, mask) >> high * 4 & 15


@triton.jit
def _pair(base, place, which, mask):  # type: ignore[no-untyped-def]
    """Two of the bits of a byte, from the lowest ones."""
    return _octet(base, place, mask) >> which * 2 & 3


@triton.jit
def _bit(base, place, which, mask):  # type: ignore[no-untyped-def]
    return _octet(base, place, mask) >> which & 1


@triton.jit
def _scale_k(base, group, mask):  # type: ignore[no-untyped-def]
    """The scale and the least value, 6 bits each, of a group of 32 values (Q4_K, Q5_K)."""
    scales, least = _octet(base, 4 + group % 4, mask), _octet(base, 8 + group % 4, mask)
    rest, is_low = _octet(base, 12 + group % 4, mask), group < 4
    scale = tl.where(is_low, scales & 63, (rest & 15) | (scales >> 2 & 48))
    return scale.to(tl.float32), tl.where(is_low, least & 63, (rest >> 4) | (least >> 2 & 48)).to(tl.float32)


@triton.jit
def _decode_blocks_kernel(  # type: ignore[no-untyped-def]
    blocks_ptr, levels_ptr, out_ptr, count,
    KIND: tl.constexpr, VALUES: tl.constexpr, BYTES: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Decode some blocks: a row of the tile is a block, its columns are the block's values."""
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    mask = (block < count)[:, None]
    base = blocks_ptr + (block * BYTES)[:, None]
    v = tl.arange(0, VALUES)[None, :]
    if KIND == 2:
        made = _half(base, 0, mask) * (_nibble(base, 2 + v % 16, v // 16, mask) - 8).to(tl.float32)
    elif KIND == 3:
        codes = _nibble(base, 4 + v % 16, v // 16, mask).to(tl.float32)
        made = _half(base, 0, mask) * codes + _half(base, 2, mask)
    elif KIND == 6:
        codes = _nibble(base, 6 + v % 16, v // 16, mask) | _bit(base, 2 + v // 8, v % 8, mask) << 4
        made = _half(base, 0, mask) * (codes - 16).to(tl.float32)
    elif KIND == 7:
        codes = _nibble(base, 8 + v % 16, v // 16, mask) | _bit(base, 4 + v // 8, v % 8, mask) << 4
        made = _half(base, 0, mask) * codes.to(tl.float32) + _half(base, 2, mask)
    elif KIND == 8:
        made = _half(base, 0, mask) * _signed(_octet(base, 2 + v, mask)).to(tl.float32)
    elif KIND == 10:
        both = _octet(base, v // 16, mask)
        codes = _pair(base, 16 + v // 128 * 32 + v % 32, v // 32 % 4, mask).to(tl.float32)
        made = _half(base, 80, mask) * (both & 15).to(tl.float32) * codes
        made -= _half(base, 82, mask) * (both >> 4).to(tl.float32)
    elif KIND == 11:
        group = v // 16
        low, high = _nibble(base, 96 + group % 8, group // 8, mask), _pair(base, 104 + group % 4, group // 4, mask)
        codes = _pair(base, 32 + v // 128 * 32 + v % 32, v // 32 % 4, mask) | _bit(base, v % 32, v // 32, mask) << 2
        made = _half(base, 108, mask) * ((low | high << 4) - 32).to(tl.float32) * (codes - 4).to(tl.float32)
    elif KIND == 12:
        scale, least = _scale_k(base, v // 32, mask)
        codes = _nibble(base, 16 + v // 64 * 32 + v % 32, v // 32 % 2, mask).to(tl.float32)
        made = _half(base, 0, mask) * scale * codes - _half(base, 2, mask) * least
    elif KIND == 13:
        scale, least = _scale_k(base, v // 32, mask)
        codes = (
            _nibble(base, 48 + v // 64 * 32 + v % 32, v // 32 % 2, mask) | _bit(base, 16 + v % 32, v // 32, mask) << 4
        )
        made = _half(base, 0, mask) * scale * codes.to(tl.float32) - _half(base, 2, mask) * least
    elif KIND == 14:
        scale = _half(base, 208, mask) * _signed(_octet(base, 192 + v // 16, mask)).to(tl.float32)
        codes = _nibble(base, v // 128 * 64 + v % 64, v // 64 % 2, mask)
        codes |= _pair(base, 128 + v // 128 * 32 + v % 32, v // 32 % 4, mask) << 4
        made = scale * (codes - 32).to(tl.float32)
    elif KIND == 20:
        made = _half(base, 0, mask) * tl.load(levels_ptr + _nibble(base, 2 + v % 16, v // 16, mask))
    elif KIND == 23:
        group = v // 32
        low, high = _nibble(base, 4 + group // 2, group % 2, mask), _pair(base, 2 + group // 4, group % 4, mask)
        levels = tl.load(levels_ptr + _nibble(base, 8 + v // 32 * 16 + v % 16, v // 16 % 2, mask))
        made = _half(base, 0, mask) * ((low | high << 4) - 32).to(tl.float32) * levels
    else:
        tl.static_assert(KIND == 39)
        exponent = _octet(base, 0, mask)
        bits = tl.where(exponent < 2, 0x200000 << tl.minimum(exponent, 1), (exponent - 1) << 23)
        made = bits.to(tl.float32, bitcast=True) * tl.load(levels_ptr + _nibble(base, 1 + v % 16, v // 16, mask))
    places = (block * VALUES)[:, None] + v
    tl.store(out_ptr + places, made.to(out_ptr.dtype.element_ty), mask=mask)
