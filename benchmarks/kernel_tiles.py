"""Candidate tiles of the kernels' products; the fastest are in `zinfer.kernels`."""

from collections.abc import Iterator
from typing import Final

from zinfer.kernels.grouped_tiles import DECODED, MOST_TOKENS, TABLES, GroupedTiles
from zinfer.kernels.int8_linear import CHOSEN, Int8Tiles
from zinfer.kernels.scaled_linear import ScaledTiles
from zinfer.kernels.tiles import FusedTiles, block_tokens_for

INT8_CANDIDATES: Final = (
    CHOSEN,
    Int8Tiles(128, 256, 128, 8, 3),
    Int8Tiles(128, 256, 64, 8, 5),
    Int8Tiles(256, 128, 128, 8, 4),
    Int8Tiles(128, 128, 128, 8, 4),
    Int8Tiles(128, 128, 128, 4, 3),
    Int8Tiles(128, 128, 256, 8, 3),
    Int8Tiles(128, 256, 128, 8, 4, 16),
)
DECODED_CANDIDATES: Final = (
    DECODED,
    GroupedTiles(128, 256, 64, 8, 3),
    GroupedTiles(256, 128, 64, 8, 4),
    GroupedTiles(256, 128, 64, 8, 3),
    GroupedTiles(128, 128, 64, 4, 4),
    GroupedTiles(128, 128, 64, 8, 4),
    GroupedTiles(128, 256, 128, 8, 2),
    GroupedTiles(64, 256, 64, 8, 4),
)
# Rows, columns, warps and stages, by the fewest tokens of a tile.
# fmt: off
_CANDIDATES: Final[dict[str, dict[int, tuple[tuple[int, int, int, int], ...]]]] = {
    "full": {
        16: ((32, 128, 4, 4), (32, 256, 4, 3), (64, 128, 4, 3), (64, 128, 4, 4), (64, 128, 4, 6), (64, 256, 4, 3),
             (128, 64, 4, 4), (128, 64, 4, 6), (128, 128, 4, 3), (128, 128, 4, 4), (128, 128, 8, 4)),
        64: ((64, 128, 4, 3), (128, 64, 4, 3), (128, 64, 4, 4), (128, 64, 8, 3), (128, 64, 8, 4), (128, 64, 8, 5),
             (128, 128, 8, 2), (128, 128, 8, 3), (256, 64, 8, 3), (256, 64, 8, 4), (256, 128, 8, 2)),
    },
    "bytes": {
        16: ((64, 128, 4, 6), (64, 256, 4, 3), (128, 128, 4, 3)),
        64: ((128, 128, 8, 3),),
    },
    "words": {
        16: ((64, 128, 4, 3), (64, 128, 4, 4), (64, 128, 4, 6), (64, 256, 4, 3), (64, 256, 4, 4), (128, 128, 4, 3),
             (128, 128, 4, 4), (128, 256, 4, 3), (128, 256, 8, 3)),
        64: ((64, 128, 4, 3), (64, 128, 4, 4), (128, 128, 4, 2), (128, 128, 4, 3), (128, 128, 8, 2), (128, 128, 8, 3),
             (128, 128, 8, 4), (128, 256, 8, 2)),
    },
    "nibbles": {
        16: ((32, 128, 4, 6), (32, 256, 4, 4), (64, 128, 4, 3), (64, 128, 4, 4), (64, 128, 4, 6), (64, 256, 4, 4),
             (128, 128, 4, 3), (128, 128, 4, 4), (128, 128, 8, 3), (128, 128, 8, 4), (128, 256, 8, 3)),
        64: ((64, 128, 4, 3), (64, 128, 4, 4), (128, 64, 4, 4), (128, 128, 4, 2), (128, 128, 4, 3), (128, 128, 8, 3),
             (128, 128, 8, 4), (128, 256, 8, 2)),
        128: ((128, 64, 8, 4), (128, 128, 8, 2), (128, 128, 8, 3), (128, 128, 8, 4), (128, 256, 8, 2)),
    },
}
# fmt: on


def fused_candidates(bits: int, tokens: int) -> Iterator[FusedTiles]:
    """Tiles worth measuring for so many tokens, at most 30."""
    block_tokens = block_tokens_for(tokens)
    left = block_tokens == 8
    shapes = [  # rows, columns, warps, stages, is the matrix left, unroll
        (64, 128, 2, 3, True, 2),
        (64, 128, 4, 4, left, 2),
        (64, 128, 4, 3, left, 4),
        (128, 128, 4, 3, left, 1),
        (128, 128, 4, 5, left, 1),
        (128, 128, 2, 4, True, 1),
        (128, 128, 2, 3, True, 2),
        (128, 128, 4, 3, left, 2),
    ]
    shapes += (
        [(64, 256, 4, 3, left, 1), (128, 128, 8, 4, left, 1)]
        if bits == 8
        else [(128, 128, 4, 3, True, 4), (128, 128, 8, 3, left, 4)]
    )
    for rows, columns, warps, stages, weights_left, unroll in shapes:
        for programs in (264, 528, 1056):
            yield FusedTiles(block_tokens, rows, columns, warps, stages, programs, weights_left, unroll)


def scaled_candidates(tokens: int) -> Iterator[ScaledTiles]:
    """Tiles worth measuring of matrices with small groups, at most 20."""
    block_tokens = block_tokens_for(tokens)
    shapes = [(64, 32, 4, 3), (64, 32, 4, 4), (128, 32, 4, 3), (128, 32, 8, 3), (64, 64, 4, 2)]
    if block_tokens == 8:  # fewer warps multiply by `mma`, not `wgmma`
        shapes += [(64, 32, 2, 3), (64, 32, 2, 4), (64, 16, 2, 5), (64, 64, 2, 2), (32, 32, 1, 3)]
    for rows, words, warps, stages in shapes:
        for programs in (528, 1056):
            yield ScaledTiles(block_tokens, rows, words, warps, stages, programs)


def grouped_candidates(table: str, block_tokens: int) -> Iterator[GroupedTiles]:
    """Tiles of a table worth measuring for so many tokens of a tile, at most 12: of many tokens also those of half as
    many, of which the last tile of an expert leaves fewer unused."""
    for kind in ("bytes", "words") if table.startswith("bytes") else (table,):
        shapes = _CANDIDATES[kind]
        for shape in shapes[max(least for least in shapes if least <= block_tokens)]:
            yield GroupedTiles(block_tokens, *shape, in_words=kind == "words")
    if block_tokens == MOST_TOKENS:
        yield TABLES[table][block_tokens // 2]
