"""How the grouped product of experts is cut into tiles. Chosen by arithmetic, not yet measured."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import torch

from zinfer.kernels.quantized import QuantizedMatrix


@dataclass(frozen=True)
class GroupedTiles:
    """A program's share of the product, powers of two.

    Args:
        block_tokens: tokens of a tile, all of one expert.
        block_rows: rows of its matrix.
        block_columns: columns of a step; fewer where a group has fewer.
        warps: of a program.
        stages: steps under way: one is multiplied while the others are loaded.
    """

    block_tokens: int
    block_rows: int
    block_columns: int
    warps: int
    stages: int


FEWEST_TOKENS: Final = 16
MOST_TOKENS: Final = 128
_MOST_TOKENS_OF_CODES: Final = 64
_LEAST_ROWS: Final = 32
_LEAST_STEP: Final = 16  # units of one tensor core instruction
_PROGRAMS: Final = 264  # two for each multiprocessor of an H200: fewer leave some of the memory's rate unused

# By tokens of a tile: those of 16 wait for memory, those of 128 multiply. With codes, tiles of 128 gave wrong sums on a
# GPU where a row is one group; they were multiplied otherwise then, and no GPU has run them since.
_FULL: Final = {
    16: GroupedTiles(16, 64, 128, 4, 4),
    32: GroupedTiles(32, 64, 128, 4, 4),
    64: GroupedTiles(64, 128, 64, 4, 4),
    128: GroupedTiles(128, 128, 64, 8, 4),
}
_CODES: Final = {
    16: GroupedTiles(16, 64, 128, 4, 6),
    32: GroupedTiles(32, 128, 128, 4, 3),
    64: GroupedTiles(64, 128, 128, 4, 3),
}
_FLOAT32: Final = GroupedTiles(16, 32, 64, 4, 2)


def grouped_tiles_for(pairs: int, num_experts: int, rows: int, weight: torch.Tensor | QuantizedMatrix) -> GroupedTiles:
    """Tiles for so many pairs of a token and an expert: about as many tokens as an expert has on the average.

    Args:
        rows: of each expert's matrix.
    """
    if weight.dtype == torch.float32:
        return _FLOAT32
    block_tokens = block_tokens_for(pairs, num_experts)
    if isinstance(weight, QuantizedMatrix):
        block_tokens = min(block_tokens, _MOST_TOKENS_OF_CODES)
    tiles = (_CODES if isinstance(weight, QuantizedMatrix) else _FULL)[block_tokens]
    least_rows = _LEAST_ROWS if block_tokens == FEWEST_TOKENS else 2 * _LEAST_ROWS
    while tiles.block_rows > least_rows and num_programs(pairs, num_experts, rows, tiles) < _PROGRAMS:
        tiles = replace(tiles, block_rows=tiles.block_rows // 2)
    return tiles


def block_tokens_for(pairs: int, num_experts: int) -> int:
    """Tokens of a tile: the least power of two that holds what an expert has on the average, between 16 and 128."""
    mean = -(-pairs // num_experts)
    return min(max(1 << (mean - 1).bit_length(), FEWEST_TOKENS), MOST_TOKENS)


def candidates(block_tokens: int) -> Iterator[GroupedTiles]:
    """Tiles worth measuring for so many tokens of a tile, at most 30."""
    shapes = [(64, 128, 4), (128, 64, 4), (128, 128, 4), (128, 64, 8), (128, 128, 8)]  # rows, columns, warps
    shapes += [(256, 64, 8)] if block_tokens >= 64 else [(32, 128, 2), (32, 128, 4), (32, 256, 4), (64, 256, 4)]
    for rows, columns, warps in shapes:
        for stages in (3, 4, 6):
            yield GroupedTiles(block_tokens, rows, columns, warps, stages)


def most_token_tiles(pairs: int, num_experts: int, block_tokens: int) -> int:
    """The most tiles that so many pairs can fill, however they are spread over the experts."""
    used = min(pairs, num_experts)
    return used + (pairs - used) // block_tokens


def num_programs(pairs: int, num_experts: int, rows: int, tiles: GroupedTiles) -> int:
    """Programs that are launched: those of tiles that stay empty end at once."""
    return most_token_tiles(pairs, num_experts, tiles.block_tokens) * -(-rows // tiles.block_rows)


def step_units(matrix: QuantizedMatrix, tiles: GroupedTiles) -> int:
    """Bytes of a row's codes that a step takes: a power of two that divides a group, if a row has several.

    In the order of fragments a byte holds codes of two rows: there these are as many columns.
    """
    per_byte = 2 if matrix.format.bits == 4 and not matrix.format.in_fragments else 1
    groups = matrix.scales.shape[1]
    group = matrix.columns // groups
    return min(tiles.block_columns, group & -group if groups > 1 else tiles.block_columns) // per_byte


def can_step(matrix: QuantizedMatrix) -> bool:
    """Whether steps of a size that tensor cores take divide the groups of a row, if it has several."""
    return step_units(matrix, _CODES[_MOST_TOKENS_OF_CODES]) >= _LEAST_STEP
