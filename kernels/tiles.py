"""Tiles of products, and the programs of the fused product of few tokens."""

from dataclasses import dataclass
from typing import Final

from zinfer.kernels.quantized import QuantizedMatrix


@dataclass(frozen=True)
class Tiles:
    """A program's share of a product, powers of two.

    Args:
        block_tokens: tokens of a tile.
        block_rows: rows of the matrix of a tile.
        block_columns: columns of a step; fewer where a group has fewer.
        warps: of a program.
        stages: steps in flight: one is multiplied while the others are loaded.
    """

    block_tokens: int
    block_rows: int
    block_columns: int
    warps: int
    stages: int

    @property
    def options(self) -> dict[str, int]:
        """Launch options, without the columns of a step, which may depend on the matrix."""
        return {
            "BLOCK_TOKENS": self.block_tokens,
            "BLOCK_ROWS": self.block_rows,
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


@dataclass(frozen=True)
class FusedTiles(Tiles):
    """A program's share of the fused product of few tokens.

    Args:
        programs: the columns are split over several programs up to this number of programs.
        weights_left: the matrix is the product's left operand, with 64 or 16 rows per instruction, and tokens the right
            one, with 8; otherwise vice versa.
        unroll: steps between two barriers. Their bytes are adjacent in the rows of the matrix, because memory is slow
            in units of 64 bytes.
    """

    programs: int
    weights_left: bool
    unroll: int = 1


_FEWEST_TOKENS: Final = 8  # of an instruction's right operand
_MOST_TOKENS: Final = 64

_MOST_PARTS: Final = 16  # that a row's columns are split into: their sums are written and read again

# The best of `benchmarks/kernels.py --tune` on an H200. Keys are bits and tokens of a tile.
_CHOSEN: Final = {
    (4, 8): FusedTiles(8, 64, 128, 2, 3, 528, True, 2),
    (4, 16): FusedTiles(16, 64, 128, 2, 3, 528, True, 2),
    (4, 32): FusedTiles(32, 128, 128, 4, 3, 264, False, 1),
    (4, 64): FusedTiles(64, 128, 128, 4, 3, 264, False, 1),
    (8, 8): FusedTiles(8, 128, 128, 2, 3, 264, True, 2),
    (8, 16): FusedTiles(16, 128, 128, 4, 3, 264, False, 2),
    (8, 32): FusedTiles(32, 128, 128, 4, 3, 264, False, 2),
    (8, 64): FusedTiles(64, 128, 128, 4, 3, 264, False, 1),
}


def tiles_for(bits: int, tokens: int) -> FusedTiles:
    """Return the tiles for ``tokens`` tokens; from 65 tokens on, a program's rows have several tiles."""
    return _CHOSEN[bits, block_tokens_for(tokens)]


def block_tokens_for(tokens: int) -> int:
    """Return the tokens of a tile: the least power of two that holds all tokens, between 8 and 64."""
    return min(max(1 << (tokens - 1).bit_length(), _FEWEST_TOKENS), _MOST_TOKENS)


@dataclass(frozen=True)
class Cut:
    """The split of a call into programs.

    A row has ``width`` units: bytes of codes with their numbers of x. A step computes ``block`` units, a program
    ``steps`` steps (a multiple of the unrolled steps), and ``num_parts`` programs share each of ``num_tiles`` tiles.
    """

    width: int
    block: int
    steps_per_group: int
    steps: int
    num_parts: int
    num_tiles: int

    @classmethod
    def of(cls, tokens: int, matrix: QuantizedMatrix, tiles: FusedTiles) -> "Cut":
        """Split the product with x [tokens, columns]."""
        width, groups = matrix.codes.shape[1], matrix.scales.shape[1]
        block = min(tiles.block_columns, most_columns(matrix)) * matrix.format.bits // 8
        num_steps = -(-width // block)
        num_tiles = -(-matrix.rows // tiles.block_rows) * -(-tokens // tiles.block_tokens)
        parts = max(1, min(tiles.programs // num_tiles, num_steps // (tiles.stages * tiles.unroll), _MOST_PARTS))
        turns = -(-num_steps // (parts * tiles.unroll))
        steps = turns * tiles.unroll
        group_units = (matrix.format.group_size or 0) * matrix.format.bits // 8
        steps_per_group = 1 if groups == 1 else group_units // block
        return cls(width, block, steps_per_group, steps, -(-num_steps // steps), num_tiles)


def most_columns(matrix: QuantizedMatrix) -> int:
    """Return the most columns of a step: a power of two that divides a group, if a row has several."""
    group = matrix.format.group_size
    return 1 << 30 if group is None or matrix.scales.shape[1] == 1 else group & -group
