"""Multiplies tokens with matrices of small groups, whose scales are numbers of one byte: MXFP4, MXFP8 and NVFP4.

A sum for each group of 16 or 32 columns, as in `fused_linear`, would be scaled as often as it is added to. Here codes
are widened and scaled in registers: products of e2m1 or e4m3 with e8m0, or of e2m1 with e4m3, have at most six
significant bits, so bfloat16 holds them exactly, but for magnitudes beyond 2**64 (which become infinite) and below
2**-60. The second level's scales are applied to the sums.

Codes are read as words, of which each number meets its own part of x's columns (`grouped_linear`). One kernel serves a
single matrix, whose columns several programs may share, and experts.
"""

from dataclasses import dataclass, replace
from typing import Final

import torch
import triton
import triton.language as tl

from zinfer.kernels.dequantize import scale_kind
from zinfer.kernels.expert_routing import Groups
from zinfer.kernels.fused_linear import add_parts
from zinfer.kernels.grouped_kernel import find_tile, store_tile
from zinfer.kernels.grouped_tiles import most_token_tiles
from zinfer.kernels.launching import device_function, dot, on_device
from zinfer.kernels.quantized import QuantizedMatrix
from zinfer.kernels.tiles import Tiles
from zinfer.kernels.widening import scale_values, widen_scaled

_MAX_PARTS: Final = 16
_MIN_STEPS: Final = 4  # of a part


@dataclass(frozen=True)
class ScaledTiles(Tiles):
    """A program's share of the product; ``block_columns`` counts words.

    Args:
        programs: the columns of a single matrix are split over several programs up to this number of programs.
    """

    programs: int = 528


_WORDS: Final = 32
# By tokens of a tile, chosen by arithmetic; `kernels.py` and `experts.py` of the benchmarks race them with --tune.
_TILES: Final = {
    8: ScaledTiles(8, 64, _WORDS, 2, 3),
    16: ScaledTiles(16, 64, _WORDS, 4, 3),
    32: ScaledTiles(32, 64, _WORDS, 4, 3),
    64: ScaledTiles(64, 64, _WORDS, 4, 3),
}


def can_scale(matrix: QuantizedMatrix) -> bool:
    """Return whether the kernel supports the matrix: in bfloat16, of whole words, each in one group."""
    format, codes_of_word = matrix.format, 32 // matrix.format.bits
    words_of_group = (format.group_size or 0) // codes_of_word
    return (
        matrix.dtype == torch.bfloat16
        and format.is_float
        and (not format.in_grid or format.group_rows == 1)
        and scale_kind(format) != "float"
        and words_of_group in (1, 2, 4, 8, 16, 32)
        and words_of_group * codes_of_word == format.group_size
        and matrix.columns % format.group_size == 0
        and matrix.codes.storage_offset() % 4 == 0
    )


def scaled_linear(
    x: torch.Tensor, matrix: QuantizedMatrix, bias: torch.Tensor | None = None, tiles: ScaledTiles | None = None
) -> torch.Tensor:
    """Return ``x @ W.T + bias`` with the values of ``matrix`` for W, sums in float32.

    Args:
        x: [..., columns], bfloat16, on the matrix's device: a GPU, or the CPU under Triton's interpreter.
        matrix: `can_scale` is true for it.
        bias: [rows].
        tiles: to use instead of the table's.
    """
    flat = x.reshape(-1, matrix.columns)
    out = torch.empty((flat.shape[0], matrix.rows), dtype=x.dtype, device=x.device)
    if out.numel():
        tiles = tiles or tiles_for(flat.shape[0], matrix.rows)
        num_tiles = -(-flat.shape[0] // tiles.block_tokens) * -(-matrix.rows // tiles.block_rows)
        steps = -(-matrix.codes.shape[1] // (4 * tiles.block_columns))
        parts = max(1, min(tiles.programs // num_tiles, steps // _MIN_STEPS, _MAX_PARTS))
        _multiply(flat, matrix, None, bias, out, tiles, -(-steps // parts))
    return out.view(*x.shape[:-1], matrix.rows)


def scaled_experts(
    x: torch.Tensor,
    matrix: QuantizedMatrix,
    groups: Groups,
    bias: torch.Tensor | None = None,
    tiles: ScaledTiles | None = None,
) -> torch.Tensor:
    """As `grouped_linear`, with ``matrix`` as in `scaled_linear`: of all experts' rows."""
    rows = matrix.rows // groups.num_experts
    out = torch.empty((groups.num_pairs, rows), dtype=x.dtype, device=x.device)
    if out.numel():
        tiles = tiles or tiles_for(-(-groups.num_pairs // groups.num_experts), rows)
        _multiply(x, matrix, groups, bias, out, tiles, -(-matrix.codes.shape[1] // (4 * tiles.block_columns)))
    return out


def tiles_for(tokens: int, rows: int) -> ScaledTiles:
    """Return tiles for so many tokens that share a matrix of so many rows."""
    tiles = _TILES[min(max(1 << (tokens - 1).bit_length(), min(_TILES)), max(_TILES))]
    return tiles if rows > tiles.block_rows // 2 else replace(tiles, block_rows=tiles.block_rows // 2)


def _multiply(
    x: torch.Tensor,
    matrix: QuantizedMatrix,
    groups: Groups | None,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    tiles: Tiles,
    steps: int,
) -> None:
    """Fill ``out`` [pairs, rows]; each program sums some steps."""
    codes_of_word = 32 // matrix.format.bits
    words, group_size = matrix.codes.contiguous().view(torch.uint8).view(torch.int32), matrix.format.group_size
    assert group_size is not None
    experts, (pairs, rows) = 1 if groups is None else groups.num_experts, out.shape
    width = words.shape[1]
    lines = x.view(x.shape[0], width, codes_of_word).permute(2, 0, 1).contiguous()
    parts = -(-width // (tiles.block_columns * steps))
    sums = torch.empty((parts, *out.shape), dtype=torch.float32, device=x.device) if parts > 1 else out
    token_tiles = most_token_tiles(pairs, experts, tiles.block_tokens)
    with on_device(x):
        _scaled_kernel[token_tiles * -(-rows // tiles.block_rows), parts](
            lines,
            words,
            matrix.scales.contiguous().view(torch.uint8),
            matrix.outer_scales,
            bias.contiguous() if bias is not None and parts == 1 else None,
            sums,
            None if groups is None else groups.order,
            None if groups is None else groups.ends,
            pairs // x.shape[0],
            experts,
            pairs,
            token_tiles,
            rows,
            width,
            matrix.scales.shape[1],
            lines[0].numel(),
            steps,
            BITS=matrix.format.bits,
            SCALES=scale_kind(matrix.format),
            WORDS_OF_GROUP=group_size // codes_of_word,
            OUTER_ROWS=matrix.format.outer_rows or 0,
            IS_OVER=matrix.format.outer == "over",
            EVEN=width % tiles.block_columns == 0,
            EXPERTS=triton.next_power_of_2(experts),
            BLOCK=tiles.block_columns,
            **tiles.options,
        )
    if parts > 1:
        add_parts(sums, bias, out)


@device_function
def _load_scales(scale_ptrs, inside, SCALES: tl.constexpr, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load the scales of a step's groups as factors in bfloat16 for `widen_scaled`; the sums need `_rest` of them."""
    scale = scale_values(tl.load(scale_ptrs, mask=inside, other=0), SCALES)
    factor: tl.constexpr = (126 if BITS == 4 else 120) - (64 if SCALES == "e8m0" else 8)
    return (scale * 2.0**factor).to(tl.bfloat16)


@triton.jit(do_not_specialize=["share", "experts", "pairs", "token_tiles", "steps"])
def _scaled_kernel(  # type: ignore[no-untyped-def]
    x_ptr, words_ptr, scales_ptr, outer_ptr, bias_ptr, out_ptr, order_ptr, ends_ptr,
    share, experts, pairs, token_tiles, rows, width, groups, part, steps,
    BITS: tl.constexpr, SCALES: tl.constexpr, WORDS_OF_GROUP: tl.constexpr, OUTER_ROWS: tl.constexpr,
    IS_OVER: tl.constexpr, EVEN: tl.constexpr, EXPERTS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute a tile of tokens and rows, summed over some steps of words; tiles of the same rows run concurrently."""
    GROUPS: tl.constexpr = BLOCK // WORDS_OF_GROUP
    if order_ptr is None:
        expert = 0
        pair = tl.program_id(0) % token_tiles * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
        inside = pair < pairs
    else:
        expert, pair, inside = find_tile(
            ends_ptr, order_ptr, tl.program_id(0) % token_tiles, experts, EXPERTS, BLOCK_TOKENS
        )
        if expert >= experts:
            return
    row = tl.program_id(0) // token_tiles * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    line = expert * rows + tl.minimum(row, rows - 1)
    unit, group = tl.arange(0, BLOCK), tl.arange(0, GROUPS)
    word_ptrs = words_ptr + line[:, None].to(tl.int64) * width + unit[None, :]
    scale_ptrs = scales_ptr + line[:, None].to(tl.int64) * groups + group[None, :]
    x_ptrs = x_ptr + (pair // share)[:, None].to(tl.int64) * width + unit[None, :]
    first = tl.program_id(1) * steps
    last = tl.minimum(first + steps, tl.cdiv(width, BLOCK))
    # The scales of a step are loaded one step ahead, since no asynchronous copy loads them early.
    scale = _load_scales(scale_ptrs + first * GROUPS, (group < groups - first * GROUPS)[None, :], SCALES, BITS)
    sums = tl.zeros((BLOCK_ROWS, BLOCK_TOKENS), tl.float32)
    for step in tl.range(first, last):
        there = (unit < width - step * BLOCK)[None, :]
        words = tl.load(word_ptrs + step * BLOCK) if EVEN else tl.load(word_ptrs + step * BLOCK, mask=there, other=0)
        after = (step + 1) * GROUPS
        next_scale = _load_scales(scale_ptrs + after, (group < groups - after)[None, :], SCALES, BITS)
        shared = tl.broadcast_to(scale[:, :, None], (BLOCK_ROWS, GROUPS, WORDS_OF_GROUP))
        weights = widen_scaled(words, tl.reshape(shared, (BLOCK_ROWS, BLOCK)), BITS)
        for number in tl.static_range(32 // BITS):
            is_x = inside[:, None] if EVEN else inside[:, None] & there
            x = tl.load(x_ptrs + number * part + step * BLOCK, mask=is_x, other=0)
            sums = dot(weights[number], tl.trans(x), sums)
        scale = next_scale
    rest: tl.constexpr = 64 if SCALES == "e8m0" else 8
    sums *= 2.0**rest
    if outer_ptr is not None:
        outer = tl.load(outer_ptr + (line // OUTER_ROWS if OUTER_ROWS else line * 0))[:, None]
        sums = sums / outer if IS_OVER else sums * outer
    own_ptr = out_ptr + tl.program_id(1).to(tl.int64) * pairs * rows
    store_tile(own_ptr, bias_ptr, sums, expert, pair, inside, row, rows)
