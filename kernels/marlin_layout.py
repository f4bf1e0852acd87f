"""Converts codes and scales to fragment order and back: permutations in plain torch, on any device.

`quantized` documents the layouts. Inputs are not changed, results are contiguous.
"""

from dataclasses import replace
from typing import Final

import torch

from zinfer.kernels.quantized import FRAGMENT_ROWS, QuantizedMatrix

_TILES: Final = 4  # of 16 rows, in a block
_STEP: Final = 64  # columns of a tile

# The bit fields of a row's number: tile, h (the half of a byte), g; and of a column's: l, t, m (which word), p, e.
_ROWS: Final = (_TILES, 2, 8)
_COLUMNS: Final = (2, 4, 2, 2, 2)


def codes_in_fragments(codes: torch.Tensor) -> torch.Tensor:
    """Convert codes of whole blocks, [rows, columns / 2] uint8, from row order to fragment order."""
    rows, width = codes.shape
    blocks, steps = rows // FRAGMENT_ROWS, 2 * width // _STEP
    nibbles = torch.stack((codes & 15, codes >> 4), dim=-1).view(blocks, *_ROWS, steps, *_COLUMNS)
    # block, tile, h, g, step, l, t, m, p, e to block, step, tile, g, t, l, m, e, p, h
    pairs = nibbles.permute(0, 4, 1, 3, 6, 5, 7, 9, 8, 2)
    return (pairs[..., 0] | pairs[..., 1] << 4).reshape(rows, width)


def codes_in_rows(codes: torch.Tensor) -> torch.Tensor:
    """Convert codes of whole blocks, [rows, columns / 2] uint8, from fragment order to row order."""
    rows, width = codes.shape
    lanes = codes.reshape(rows // FRAGMENT_ROWS, 2 * width // _STEP, _TILES, 8, 4, 2, 2, 2, 2)
    nibbles = torch.stack((lanes & 15, lanes >> 4), dim=-1)
    pairs = nibbles.permute(0, 2, 9, 3, 1, 5, 4, 6, 8, 7)
    return (pairs[..., 0] | pairs[..., 1] << 4).reshape(rows, width)


def columns_in_fragments(x: torch.Tensor) -> torch.Tensor:
    """Reorder the columns of x [tokens, columns] like the bytes of a row's codes, for products with them."""
    tokens, columns = x.shape
    steps = x.view(tokens, columns // _STEP, *_COLUMNS)
    return steps.permute(0, 1, 3, 2, 4, 6, 5).reshape(tokens, columns)


def scales_in_fragments(scales: torch.Tensor) -> torch.Tensor:
    """Convert scales of whole blocks, [rows, groups], from row order to fragment order."""
    rows, groups = scales.shape
    return scales.reshape(rows // FRAGMENT_ROWS, *_ROWS, groups).permute(0, 4, 3, 1, 2).reshape(rows, groups)


def scales_in_rows(scales: torch.Tensor) -> torch.Tensor:
    """Convert scales of whole blocks, [rows, groups], from fragment order to row order."""
    rows, groups = scales.shape
    return scales.reshape(rows // FRAGMENT_ROWS, groups, 8, _TILES, 2).permute(0, 3, 4, 2, 1).reshape(rows, groups)


def in_rows(matrix: QuantizedMatrix) -> QuantizedMatrix:
    """Return the matrix in row order; the same object if it is in that order."""
    if not matrix.format.in_fragments:
        return matrix
    format = replace(matrix.format, in_fragments=False)
    return replace(matrix, format=format, codes=codes_in_rows(matrix.codes), scales=scales_in_rows(matrix.scales))


def put_scales(target: QuantizedMatrix, scales: torch.Tensor) -> None:
    """Fill a matrix's scales, in its own order, from scales [rows, groups] in row order."""
    target.scales.copy_(scales_in_fragments(scales) if target.format.in_fragments else scales)
