"""Multiplies tokens with the matrices of the experts chosen for them: a product with all experts in one launch.

What is sorted are not tokens but the numbers of pairs of a token and an expert (`Groups`). A program finds in them
which expert its tile of tokens has, reads their rows where they lie, and writes each sum to its pair's own place: so
nothing is gathered or put back, and the host need not know how many tokens an expert has. A graph can hold all of it.
Matrices of experts without tokens are not read.

Weights are in full, [experts, rows, columns] with rows or columns beside each other, or quantized, where bare codes are
multiplied and the sum over each group is scaled (`fused_linear`). Sums are taken in a fixed order, in float32.
"""

from typing import Final, TypeAlias

import torch
import triton
from torch.nn import functional

from zinfer.kernels.dequantize import dequantize, dequantize_ref, has_kernels, kernel_codes
from zinfer.kernels.fragments import columns_in_fragments
from zinfer.kernels.grouped_kernel import grouped_kernel
from zinfer.kernels.grouped_tiles import (
    GroupedTiles,
    can_step,
    grouped_tiles_for,
    most_token_tiles,
    num_programs,
    step_units,
)
from zinfer.kernels.groups import Groups
from zinfer.kernels.launching import INTERPRETED, on_device
from zinfer.kernels.quantized import QuantizedMatrix

ExpertWeights: TypeAlias = torch.Tensor | QuantizedMatrix
"""[experts, rows, columns], or a matrix of all experts' rows one below the other."""

_DTYPES: Final = (torch.float16, torch.bfloat16, torch.float32)


def can_group(weight: ExpertWeights) -> bool:
    """Whether `grouped_linear` takes the weights: of any form on the CPU, where each expert is multiplied by torch."""
    if isinstance(weight, QuantizedMatrix):
        return weight.codes.device.type == "cpu" or (has_kernels(weight) and _has_form(weight))
    return weight.device.type == "cpu" or (weight.is_cuda and weight.dtype in _DTYPES)


def grouped_linear(
    x: torch.Tensor, weight: ExpertWeights, groups: Groups, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``x @ W.T + bias`` of each pair's own expert: by the kernel on a GPU, elsewhere by torch, one expert at a time.

    Args:
        x: [tokens, columns] or [pairs, columns], of the weights' dtype and device.
        weight: one that `can_group` names.
        bias: [experts, rows].

    Returns:
        [pairs, rows], in the order of pairs.
    """
    if x.device.type == "cpu":
        return grouped_linear_ref(x, weight, groups, bias)
    return grouped_linear_kernel(x, weight, groups, bias)


def grouped_linear_ref(
    x: torch.Tensor, weight: ExpertWeights, groups: Groups, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """As `grouped_linear`, expert by expert; in float64, values of weights included, where x is so."""
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
        tiles: others than those of the table.
    """
    assert (x.dtype, x.shape[1]) == (weight.dtype, _columns(weight))
    rows = _rows(weight, groups)
    out = torch.empty((groups.num_pairs, rows), dtype=x.dtype, device=x.device)
    if out.numel():
        with on_device(x):
            tiles = tiles or grouped_tiles_for(groups.num_pairs, groups.num_experts, rows, weight)
            _launch(x, weight, groups, bias, out, tiles)
    return out


def _launch(
    x: torch.Tensor,
    weight: ExpertWeights,
    groups: Groups,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    tiles: GroupedTiles,
) -> None:
    """Fill out [pairs, rows] for x [tokens or pairs, columns]."""
    pairs, rows = out.shape
    form = _form_of(weight)
    lines = _in_order(x, form)
    width = lines.shape[-1]
    if isinstance(weight, QuantizedMatrix):
        stored, scales, zeros = kernel_codes(weight), weight.scales.contiguous(), weight.zeros
        expert_stride, stride, transposed = rows * stored.shape[1], stored.shape[1], False
        num_groups, block = scales.shape[1], step_units(weight, tiles)
        is_float = weight.format.is_float
    else:
        transposed = weight.stride(1) == 1 and weight.stride(2) != 1
        stored = weight if transposed or weight.stride(2) == 1 else weight.contiguous()
        expert_stride, stride = stored.stride(0), stored.stride(2 if transposed else 1)
        scales, zeros, num_groups, block, is_float = None, None, 1, tiles.block_columns, False
    grouped_kernel[(num_programs(pairs, groups.num_experts, rows, tiles),)](
        lines,
        stored,
        scales,
        None if zeros is None else zeros.contiguous(),
        None if bias is None else bias.contiguous(),
        out,
        groups.order,
        groups.ends,
        pairs // x.shape[0],
        groups.num_experts,
        most_token_tiles(pairs, groups.num_experts, tiles.block_tokens),
        rows,
        width,
        expert_stride,
        stride,
        num_groups,
        lines[0].numel(),
        FORM=form,
        IS_FLOAT=is_float,
        IS_BFLOAT=x.dtype == torch.bfloat16,
        ONE_GROUP=num_groups == 1,
        STEPS_PER_GROUP=1 if num_groups == 1 else width // num_groups // block,
        EVEN=width % block == 0,
        TRANSPOSED=transposed,
        EXPERTS=triton.next_power_of_2(groups.num_experts),
        BLOCK_TOKENS=tiles.block_tokens,
        BLOCK_ROWS=tiles.block_rows,
        BLOCK=block,
        COMPILED=not INTERPRETED,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )


def _form_of(weight: ExpertWeights) -> str:
    if not isinstance(weight, QuantizedMatrix):
        return "full"
    if weight.format.in_fragments:
        return "fragments"
    return "nibbles" if weight.format.bits == 4 else "bytes"


def _in_order(x: torch.Tensor, form: str) -> torch.Tensor:
    """x [tokens, columns] in the order in which codes lie, contiguous: of nibbles even columns, then odd ones."""
    if form == "fragments":
        return columns_in_fragments(x.contiguous())
    if form == "nibbles":
        x = functional.pad(x, (0, x.shape[1] % 2))
        return x.view(x.shape[0], -1, 2).permute(2, 0, 1).contiguous()
    return x.contiguous()


def _columns(weight: ExpertWeights) -> int:
    return weight.columns if isinstance(weight, QuantizedMatrix) else weight.shape[2]


def _rows(weight: ExpertWeights, groups: Groups) -> int:
    """Of each expert's matrix."""
    return weight.rows // groups.num_experts if isinstance(weight, QuantizedMatrix) else weight.shape[1]


def _has_form(matrix: QuantizedMatrix) -> bool:
    """Whether the codes lie as the kernel reads them."""
    has_own_columns = matrix.column_scales is not None or matrix.column_order is not None
    return matrix.dtype in _DTYPES and not has_own_columns and can_step(matrix)
