"""Tiles of the grouped product of experts.

Timed on an H200 with the experts of Qwen3-30B-A3B (128 of 1536 x 2048 and 2048 x 768, 8 per token) and of Mixtral-8x7B,
1 to 4,096 tokens, in full bfloat16, INT8 with a scale per row and in groups of 128, and INT4 in groups of 128
(`benchmarks/experts.py --tune`): those here were fastest or within 2 %. With 4,096 tokens Qwen3's reach 468 TFLOP/s
with full weights, 354 with INT8, 297 with INT4.

8-bit codes are read as words: a load from shared memory reads two bytes, or eight bytes of words. In groups of 128, a
tile of 128 tokens and 128 rows would spill 1,140 bytes a thread to memory; one of 64 rows spills none.
"""

from dataclasses import dataclass, replace
from typing import Final

import torch

from zinfer.kernels.quantized import QuantizedMatrix
from zinfer.kernels.tiles import Tiles, most_columns


@dataclass(frozen=True)
class GroupedTiles(Tiles):
    """A program's share of the product.

    Args:
        in_words: whether 8-bit codes are read as words of four, if rows are whole words; x is rearranged before, since
            each code of a word is multiplied with a quarter of x's columns.
    """

    in_words: bool = False


FEWEST_TOKENS: Final = 16
MOST_TOKENS: Final = 128
_LEAST_ROWS: Final = 32
_LEAST_STEP: Final = 16  # units of one tensor core instruction
_PROGRAMS: Final = 264  # two for each multiprocessor of an H200: fewer leave some of the memory's rate unused

# By tokens of a tile: tiles of 16 are limited by memory, tiles of 128 by compute. With 4-bit codes none of 128 beat
# that of 64. With groups, a group's sums need registers beside the total sums: few rows, or many warps.
_FULL: Final = {
    16: GroupedTiles(16, 128, 64, 4, 6),
    32: GroupedTiles(32, 64, 128, 4, 3),
    64: GroupedTiles(64, 128, 64, 4, 3),
    128: GroupedTiles(128, 256, 64, 8, 4),
}
_BYTES: Final = {
    16: GroupedTiles(16, 64, 256, 4, 3, in_words=True),
    32: GroupedTiles(32, 128, 128, 4, 3, in_words=True),
    64: GroupedTiles(64, 128, 128, 4, 3, in_words=True),
    128: GroupedTiles(128, 128, 128, 4, 2, in_words=True),
}
_BYTES_IN_GROUPS: Final = {
    16: GroupedTiles(16, 128, 128, 4, 3, in_words=True),
    32: GroupedTiles(32, 64, 128, 4, 4, in_words=True),
    64: GroupedTiles(64, 64, 128, 4, 3, in_words=True),
    128: GroupedTiles(128, 64, 128, 4, 3, in_words=True),
}
_NIBBLES: Final = {
    16: GroupedTiles(16, 128, 128, 4, 3),
    32: GroupedTiles(32, 128, 128, 4, 3),
    64: GroupedTiles(64, 128, 128, 4, 3),
}
DECODED: Final = GroupedTiles(128, 256, 64, 8, 4)
"""Of many tokens with matrices that were dequantized."""
TABLES: Final = {"full": _FULL, "bytes": _BYTES, "bytes in groups": _BYTES_IN_GROUPS, "nibbles": _NIBBLES}
_FEW_BYTES: Final = GroupedTiles(16, _LEAST_ROWS, 128, 4, 6)  # with so few rows, words take a quarter longer
_FLOAT32: Final = GroupedTiles(16, 32, 64, 4, 2)


def grouped_tiles_for(pairs: int, num_experts: int, rows: int, weight: torch.Tensor | QuantizedMatrix) -> GroupedTiles:
    """Return tiles for ``pairs`` pairs of a token and an expert: about as many tokens as an expert has on average.

    Args:
        rows: of each expert's matrix.
    """
    if weight.dtype == torch.float32:
        return _FLOAT32
    table = TABLES[table_of(weight)]
    block_tokens = min(block_tokens_for(pairs, num_experts), max(table))
    tiles = table[block_tokens]
    least_rows = _LEAST_ROWS if block_tokens == FEWEST_TOKENS else 2 * _LEAST_ROWS
    while tiles.block_rows > least_rows and num_programs(pairs, num_experts, rows, tiles) < _PROGRAMS:
        tiles = replace(tiles, block_rows=tiles.block_rows // 2)
    return _FEW_BYTES if tiles.in_words and tiles.block_rows == _LEAST_ROWS else tiles


def block_tokens_for(pairs: int, num_experts: int) -> int:
    """Return a tile's tokens: the least power of two that holds an expert's average tokens, between 16 and 128."""
    mean = -(-pairs // num_experts)
    return min(max(1 << (mean - 1).bit_length(), FEWEST_TOKENS), MOST_TOKENS)


def table_of(weight: torch.Tensor | QuantizedMatrix) -> str:
    """Return a matrix's table of tiles: "full", "bytes" (8-bit codes), "bytes in groups" or "nibbles" (4-bit codes)."""
    if not isinstance(weight, QuantizedMatrix):
        return "full"
    if weight.format.bits == 4:
        return "nibbles"
    return "bytes in groups" if weight.scales.shape[1] > 1 else "bytes"


def most_token_tiles(pairs: int, num_experts: int, block_tokens: int) -> int:
    """Return the most tiles that ``pairs`` pairs can fill, however they are distributed over the experts."""
    used = min(pairs, num_experts)
    return used + (pairs - used) // block_tokens


def num_programs(pairs: int, num_experts: int, rows: int, tiles: GroupedTiles) -> int:
    """Return the number of programs to launch; programs of empty tiles exit at once."""
    return most_token_tiles(pairs, num_experts, tiles.block_tokens) * -(-rows // tiles.block_rows)


def takes_words(matrix: QuantizedMatrix, tiles: GroupedTiles) -> bool:
    """Return whether codes are read as words: 8-bit codes, 16-bit x, rows of whole words, and steps of enough words."""
    if matrix.format.bits != 8 or not tiles.in_words or matrix.dtype == torch.float32:
        return False
    are_whole = matrix.columns % 4 == 0 and matrix.codes.storage_offset() % 4 == 0
    return are_whole and min(tiles.block_columns, most_columns(matrix)) >= 4 * _LEAST_STEP


def step_units(matrix: QuantizedMatrix, tiles: GroupedTiles) -> int:
    """Return the units of a row's codes in a step: a power of two that divides a group, if a row has several.

    Units are bytes, or words if `takes_words`. In fragment order a byte holds codes of two rows, so a unit is a column.
    """
    columns = min(tiles.block_columns, most_columns(matrix))
    if takes_words(matrix, tiles):
        return columns // 4
    return columns // 2 if matrix.format.bits == 4 and not matrix.format.in_fragments else columns


def can_step(matrix: QuantizedMatrix) -> bool:
    """Return whether steps that tensor cores support divide the groups of a row, if it has several."""
    is_float4 = matrix.format.bits == 4 and matrix.format.is_float
    return matrix.format.outer is None and not is_float4 and step_units(matrix, _FEW_BYTES) >= _LEAST_STEP
