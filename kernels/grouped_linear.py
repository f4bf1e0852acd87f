"""Multiplies tokens with the matrices of their chosen experts: a product with all experts in one launch.

The numbers of pairs of a token and an expert are sorted, not the tokens (`Groups`). A program looks up the expert of
its tile, reads the tokens' rows in place, and writes each sum to its pair's row: there is no gather or scatter, the
host need not know how many tokens an expert has, and a graph can capture it. Matrices of experts without tokens are not
read.

If there are no more pairs than experts, few pairs share an expert: with codes in fragment order, each pair then reads
its own matrix (`fragment_linear.chosen_linear`), unsorted. On an H200 that takes 0.2 to 0.9 of the time.

Weights are full, [experts, rows, columns] with contiguous rows or columns; or quantized: then unscaled codes are
multiplied and the sum over each group is scaled (`fused_linear`), or codes of small groups are scaled before
(`scaled_linear`). Sums are added in a fixed order, in float32.

With many tokens an expert, widening each matrix again for each tile of tokens costs more than writing it once: then
some experts at a time are dequantized, as many as fit in `MAX_DECODED_BYTES`, and multiplied in full.

Torch's grouped product of full bfloat16, with its gather and scatter, is at most 5 % faster (`benchmarks/experts.py`),
and is not used.
"""

from typing import Final, TypeAlias

import torch
import triton
import triton.language as tl
from torch.nn import functional

from zinfer.kernels.dequantize import (
    dequantize,
    dequantize_kernel,
    dequantize_ref,
    has_kernels,
    kernel_parts,
    scale_kind,
)
from zinfer.kernels.expert_routing import Groups
from zinfer.kernels.fragment_linear import can_multiply, chosen_linear, most_pairs
from zinfer.kernels.grouped_kernel import decoded_kernel, grouped_kernel
from zinfer.kernels.grouped_tiles import (
    DECODED,
    GroupedTiles,
    can_step,
    grouped_tiles_for,
    most_token_tiles,
    num_programs,
    step_units,
    takes_words,
)
from zinfer.kernels.launching import on_device
from zinfer.kernels.marlin_layout import columns_in_fragments
from zinfer.kernels.quantized import QuantizedMatrix
from zinfer.kernels.scaled_linear import can_scale, scaled_experts

FEWEST_DECODED_TOKENS: Final = 384
"""Tokens an expert, on average, from which on its matrix is dequantized first.

By arithmetic for an H200: E4M3 is dequantized at 3.6 TB/s and multiplied at 550 TFLOP/s, or multiplied as codes at 340.
"""
FEWEST_DECODED_TOKENS_IN_SMALL_GROUPS: Final = 128
"""As `FEWEST_DECODED_TOKENS` where `scaled_linear` multiplies: its tiles of 64 tokens widen codes more often."""
MAX_DECODED_BYTES: Final = 1 << 30
"""The most bytes of experts' matrices that are dequantized at a time, if they are several."""

ExpertWeights: TypeAlias = torch.Tensor | QuantizedMatrix
"""[experts, rows, columns], or a quantized matrix of all experts' rows, stacked."""

_DTYPES: Final = (torch.float16, torch.bfloat16, torch.float32)
_COLUMNS_OF_UNIT: Final = {"fragments": 1, "bytes": 1, "nibbles": 2, "words": 4}
_BLOCK: Final = 1024  # fours of columns
_WARPS: Final = 4


def can_group(weight: ExpertWeights) -> bool:
    """Return whether `grouped_linear` supports the weights: all on the CPU, where torch multiplies expert by expert."""
    if not isinstance(weight, QuantizedMatrix):
        return weight.device.type == "cpu" or (weight.is_cuda and weight.dtype in _DTYPES)
    if weight.codes.device.type == "cpu":
        return True
    has_own_columns = weight.column_scales is not None or weight.column_order is not None
    is_supported = can_scale(weight) or (weight.dtype in _DTYPES and can_step(weight))
    return has_kernels(weight) and not has_own_columns and is_supported


def grouped_linear(
    x: torch.Tensor, weight: ExpertWeights, groups: Groups, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return ``x @ W.T + bias`` with each pair's expert: by the kernel on a GPU, else by torch, expert by expert.

    Args:
        x: [tokens, columns] or [pairs, columns], of the weights' dtype and device.
        weight: `can_group` is true for it.
        bias: [experts, rows].

    Returns:
        [pairs, rows], in the order of pairs.
    """
    if x.device.type == "cpu":
        return grouped_linear_ref(x, weight, groups, bias)
    if isinstance(weight, QuantizedMatrix) and decodes(weight, groups):
        return decoded_linear(x, weight, groups, bias)
    if isinstance(weight, QuantizedMatrix) and can_scale(weight):
        return scaled_experts(x, weight, groups, bias)
    if isinstance(weight, QuantizedMatrix) and can_multiply(weight):
        rows = _rows(weight, groups)
        if groups.num_pairs <= min(groups.num_experts, most_pairs(rows)):
            return chosen_linear(x, weight, groups.chosen, rows, bias)
    return grouped_linear_kernel(x, weight, groups, bias)


def decodes(weight: QuantizedMatrix, groups: Groups) -> bool:
    """Return whether experts have so many tokens that their matrices are dequantized first."""
    fewest = FEWEST_DECODED_TOKENS_IN_SMALL_GROUPS if can_scale(weight) else FEWEST_DECODED_TOKENS
    return weight.dtype != torch.float32 and groups.num_pairs >= fewest * groups.num_experts


def decoded_linear(
    x: torch.Tensor,
    weight: QuantizedMatrix,
    groups: Groups,
    bias: torch.Tensor | None = None,
    tiles: GroupedTiles = DECODED,
    max_bytes: int = MAX_DECODED_BYTES,
) -> torch.Tensor:
    """As `grouped_linear`, with matrices of some experts at a time dequantized to rounded elements.

    Runs on a GPU, or on the CPU under Triton's interpreter; of 16-bit dtypes.

    Args:
        max_bytes: of dequantized matrices at a time, but for a single one.
    """
    pairs, rows, columns = groups.num_pairs, _rows(weight, groups), weight.columns
    out = torch.empty((pairs, rows), dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    x, bias = x.contiguous(), None if bias is None else bias.contiguous()
    experts = min(max(max_bytes // max(rows * columns * x.itemsize, 1), 1), groups.num_experts)
    scratch = torch.empty((experts * rows, columns), dtype=x.dtype, device=x.device)
    for first in range(0, groups.num_experts, experts):
        count = min(experts, groups.num_experts - first)
        decoded = dequantize_kernel(weight.part(slice(first * rows, (first + count) * rows)), scratch[: count * rows])
        token_tiles = -(-pairs * count // (groups.num_experts * tiles.block_tokens)) + count
        with on_device(x):
            decoded_kernel[(token_tiles * -(-rows // tiles.block_rows),)](
                x,
                decoded,
                bias,
                out,
                groups.order,
                groups.ends,
                pairs // x.shape[0],
                first,
                count,
                rows,
                columns,
                EVEN=columns % tiles.block_columns == 0,
                EXPERTS=max(triton.next_power_of_2(experts), 2),
                BLOCK=tiles.block_columns,
                **tiles.options,
            )
    return out


def grouped_linear_ref(
    x: torch.Tensor, weight: ExpertWeights, groups: Groups, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """As `grouped_linear`, expert by expert; with float64 x, weights are dequantized to float64 too."""
    columns, rows = x.shape[1], _rows(weight, groups)
    share = groups.num_pairs // max(x.shape[0], 1)
    out = torch.empty((groups.num_pairs, rows), dtype=x.dtype, device=x.device)
    begin = 0
    for expert, end in enumerate(groups.ends.tolist()):
        if end > begin:
            pairs, own = groups.order[begin:end], None if bias is None else bias[expert].to(x.dtype)
            if isinstance(weight, QuantizedMatrix):
                part = weight.part(slice(expert * rows, (expert + 1) * rows))
                matrix = dequantize(part) if x.dtype == part.dtype else dequantize_ref(part, x.dtype)
            else:
                matrix = weight[expert].to(x.dtype)
            assert matrix.shape == (rows, columns)
            out[pairs] = functional.linear(x[pairs // share], matrix, own)
        begin = end
    return out


def grouped_linear_kernel(
    x: torch.Tensor,
    weight: ExpertWeights,
    groups: Groups,
    bias: torch.Tensor | None = None,
    tiles: GroupedTiles | None = None,
) -> torch.Tensor:
    """As `grouped_linear`, by the Triton kernel: on a GPU, or on the CPU under Triton's interpreter.

    Args:
        tiles: to use instead of the table's.
    """
    pairs, rows = groups.num_pairs, _rows(weight, groups)
    out = torch.empty((pairs, rows), dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    tiles = tiles or grouped_tiles_for(pairs, groups.num_experts, rows, weight)
    transposed = is_float = False
    scales = zeros = None
    if isinstance(weight, QuantizedMatrix):
        form, block, is_float = _form(weight, tiles), step_units(weight, tiles), weight.format.is_float
        codes, scales, zeros = kernel_parts(weight)
        stored = (codes.view(torch.int32) if form == "words" else codes).view(groups.num_experts, rows, -1)
    else:
        form, block = "full", tiles.block_columns
        transposed = weight.stride(1) == 1 and weight.stride(2) != 1
        stored = weight if transposed or weight.stride(2) == 1 else weight.contiguous()
    num_groups, steps_per_group = 1 if scales is None else scales.shape[1], 1
    scale_kinds = {"SCALES": "float", "GROUP_ROWS": 1}
    if isinstance(weight, QuantizedMatrix):
        format = weight.format
        scale_kinds = {"SCALES": scale_kind(format), "GROUP_ROWS": format.group_rows or 0 if format.in_grid else 1}
        if num_groups > 1 and format.group_size is not None:
            steps_per_group = format.group_size // (_COLUMNS_OF_UNIT[form] * block)
    lines = _in_order(x, form)
    width = lines.shape[-1]
    with on_device(x):
        grouped_kernel[(num_programs(pairs, groups.num_experts, rows, tiles),)](
            lines,
            stored,
            scales,
            zeros,
            None if bias is None else bias.contiguous(),
            out,
            groups.order,
            groups.ends,
            pairs // x.shape[0],
            groups.num_experts,
            most_token_tiles(pairs, groups.num_experts, tiles.block_tokens),
            rows,
            width,
            stored.stride(0),
            stored.stride(2 if transposed else 1),
            num_groups,
            lines[0].numel(),
            FORM=form,
            IS_FLOAT=is_float,
            IS_BFLOAT=x.dtype == torch.bfloat16,
            ONE_GROUP=num_groups == 1,
            STEPS_PER_GROUP=steps_per_group,
            EVEN=width % block == 0,
            TRANSPOSED=transposed,
            EXPERTS=triton.next_power_of_2(groups.num_experts),
            BLOCK=block,
            **scale_kinds,
            **tiles.options,
        )
    return out


def _form(matrix: QuantizedMatrix, tiles: GroupedTiles) -> str:
    """Return the form in which the kernel reads the codes."""
    if matrix.format.in_fragments:
        return "fragments"
    if matrix.format.bits == 4:
        return "nibbles"
    return "words" if takes_words(matrix, tiles) else "bytes"


def _in_order(x: torch.Tensor, form: str) -> torch.Tensor:
    """Return x [tokens, columns] in the order of the codes, contiguous: for nibbles, even columns, then odd ones."""
    if form == "fragments":
        return columns_in_fragments(x.contiguous())
    if form == "words":
        return in_quarters(x.contiguous())
    if form == "nibbles":
        x = functional.pad(x, (0, x.shape[1] % 2))
        return x.view(x.shape[0], -1, 2).permute(2, 0, 1).contiguous()
    return x.contiguous()


def _rows(weight: ExpertWeights, groups: Groups) -> int:
    """Return the number of rows of each expert's matrix."""
    return weight.rows // groups.num_experts if isinstance(weight, QuantizedMatrix) else weight.shape[1]


def in_quarters(x: torch.Tensor) -> torch.Tensor:
    """Rearrange x [tokens, columns] to [4, tokens, columns / 4]: columns 0, 4, 8 and on, then 1, 5, 9 and on.

    This is the order in which words of four codes are widened.

    Args:
        x: contiguous, 16-bit, with a multiple of four columns; on a GPU, or under Triton's interpreter.
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
    """Rearrange some fours of columns, each a 64-bit word."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    words = tl.load(words_ptr + place, mask=inside, other=0)
    for part in tl.static_range(4):
        tl.store(out_ptr + part * count.to(tl.int64) + place, (words >> 16 * part).to(tl.int16), mask=inside)
