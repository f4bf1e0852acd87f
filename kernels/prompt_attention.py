"""Attention of segments with many queries (prompt chunks): a program computes successive queries with all their keys.

Rows of a tile are queries times the heads that share a KV head. Tiles of keys that every row sees need no mask; those
that no row sees are skipped. The kernel searches its segment, so the host reads no value of the layout's tensors. A
query's result does not depend on how its prompt is split into chunks of several tokens.
"""

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

from zinfer.kernels.attention_arguments import AttentionRule, tile_arguments
from zinfer.kernels.attention_tile import attend, first_state, load_rows, whole_sums
from zinfer.kernels.kv_pages import KVPages, PagedLayout
from zinfer.kernels.launching import device_function, on_device


@dataclass(frozen=True)
class PromptTiles:
    """A program's tile: rows, keys of a step, warps, and steps in flight."""

    rows: int
    keys: int
    warps: int
    stages: int


# By the wider of keys and values, up to this many columns, for 16 bits: each of two groups of four warps holds the 64
# rows of an instruction. Sums stay in registers, keys and values of the steps in flight in shared memory.
_BY_COLUMNS: Final = {
    128: PromptTiles(128, 64, 8, 3),
    256: PromptTiles(128, 32, 8, 3),
    1024: PromptTiles(64, 16, 8, 2),
}
_WIDE: Final = PromptTiles(32, 16, 8, 2)  # float32, without tensor cores


def prompt_tiles_for(head_dim: int, value_dim: int, dtype: torch.dtype) -> PromptTiles:
    """Return the tiles for a model's heads and dtype."""
    if dtype == torch.float32:
        return _WIDE
    return _BY_COLUMNS[min(most for most in _BY_COLUMNS if most >= max(head_dim, value_dim))]


def prompt_attention(
    query: torch.Tensor,
    pages: KVPages,
    layout: PagedLayout,
    rule: AttentionRule,
    out: torch.Tensor,
    tiles: PromptTiles | None = None,
) -> None:
    """Fill the rows of ``out`` that belong to segments of many queries, on a GPU or under Triton's interpreter.

    Args:
        query: [tokens, heads, head_dim], columns contiguous.
        layout: segments before `num_decodes` are skipped; if it is None, segments of one query are.
        out: [tokens, heads, value_dim], contiguous.
        tiles: to use instead of the table's.
    """
    tiles = tiles or prompt_tiles_for(query.shape[2], pages.values.shape[3], query.dtype)
    shared = query.shape[1] // pages.values.shape[2]
    tile_heads = min(shared, tiles.rows)
    tile_queries = tiles.rows // tile_heads
    first_segment = layout.num_decodes or 0
    segments = layout.context_lengths.shape[0] - first_segment
    # Segments do not share tiles: at most one more tile for each.
    num_tiles = (query.shape[0] - first_segment) // tile_queries + segments
    if segments == 0:
        return
    with on_device(query):
        _prompt_kernel[(num_tiles, pages.values.shape[2] * triton.cdiv(shared, tile_heads))](
            **tile_arguments(query, pages, layout, rule, words=False),
            out=out,
            first_segment=first_segment,
            segments=segments,
            SKIP_SINGLE=layout.num_decodes is None,
            TILE_HEADS=tile_heads,
            TILE_QUERIES=tile_queries,
            ROWS=tiles.rows,
            BLOCK_KEYS=tiles.keys,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )


@device_function
def _segment_of(tile, starts, first_segment, segments, TILE_QUERIES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the segment, counted from the first, and the tile's number in it.

    The tiles of segment i, whose first query is s, begin at s // TILE_QUERIES + i.
    """
    low, high = tile * 0, tile * 0 + segments
    while high - low > 1:
        middle = (low + high) // 2
        begin = (tl.load(starts + first_segment + middle) - first_segment) // TILE_QUERIES + middle
        low = tl.where(begin <= tile, middle, low)
        high = tl.where(begin <= tile, high, middle)
    return low, tile - (tl.load(starts + first_segment + low) - first_segment) // TILE_QUERIES - low


@triton.jit(do_not_specialize=["table_row", "first_segment", "segments"])
def _prompt_kernel(  # type: ignore[no-untyped-def]
    query, out, starts, lengths, table, keys, values, key_scales, value_scales, slopes, sinks,
    query_token, query_head, table_row,
    scale, factor, softcap, window,
    first_segment, segments,
    KEY_TOKEN: tl.constexpr, KEY_HEAD: tl.constexpr, VALUE_TOKEN: tl.constexpr, VALUE_HEAD: tl.constexpr,
    KV_HEADS: tl.constexpr, SHARED: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    MAIN: tl.constexpr, REST: tl.constexpr, COLUMNS: tl.constexpr, PAGE_SIZE: tl.constexpr,
    TILE_HEADS: tl.constexpr, TILE_QUERIES: tl.constexpr, ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    SKIP_SINGLE: tl.constexpr, IS_FLOAT: tl.constexpr, WORDS: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Compute one tile of queries and heads. The last tiles of a segment see the most keys, so programs start there."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    segment, tile = _segment_of(tile, starts, first_segment, segments, TILE_QUERIES)
    segment += first_segment
    start = tl.load(starts + segment)
    num_queries = tl.load(starts + segment + 1) - start
    begin_query = tile * TILE_QUERIES
    if begin_query >= num_queries:
        return
    if SKIP_SINGLE and num_queries == 1:
        return
    row = tl.arange(0, ROWS)
    kv_head = tl.program_id(1) % KV_HEADS
    shared = tl.program_id(1) // KV_HEADS * TILE_HEADS + row % TILE_HEADS
    query_index = begin_query + row // TILE_HEADS
    in_rows = (row < TILE_HEADS * TILE_QUERIES) & (shared < SHARED) & (query_index < num_queries)
    head = kv_head * SHARED + shared
    parts = load_rows(query, start + query_index, head, in_rows, query_token, query_head, HEAD_DIM, MAIN, REST, WORDS)
    slope = None
    if slopes is not None:
        slope = tl.load(slopes + head, mask=in_rows, other=0).to(tl.float32)
    most, total, sums = first_state(sinks, head, in_rows, factor, True, ROWS, COLUMNS, WORDS, LEVELS)

    first_place = tl.load(lengths + segment) - num_queries + begin_query
    end = first_place + tl.minimum(TILE_QUERIES, num_queries - begin_query)
    place = first_place + row // TILE_HEADS
    # Keys from ``seen_by_all`` to ``seen_by_all_end`` are seen by every row.
    first, seen_by_all = 0, 0
    if window is not None:
        first = tl.maximum(first_place - window + 1, 0)
        seen_by_all = tl.minimum(tl.cdiv(tl.maximum(end - window, 0), BLOCK_KEYS) * BLOCK_KEYS, end)
    seen_by_all_end = (first_place + 1) // BLOCK_KEYS * BLOCK_KEYS
    table += segment.to(tl.int64) * table_row
    keys += kv_head * KEY_HEAD
    values += kv_head * VALUE_HEAD
    if key_scales is not None:
        key_scales += kv_head * PAGE_SIZE
        value_scales += kv_head * PAGE_SIZE
    for part in tl.static_range(1 if window is None else 0, 3):
        if part == 0:
            begin, stop = first // BLOCK_KEYS * BLOCK_KEYS, seen_by_all
        elif part == 1:
            begin, stop = seen_by_all, seen_by_all_end
        else:
            begin, stop = tl.maximum(seen_by_all, seen_by_all_end), end
        most, total, sums = attend(
            most, total, sums, parts, place, slope, begin, stop, first,
            table, keys, values, key_scales, value_scales, KEY_TOKEN, VALUE_TOKEN,
            scale, factor, softcap, window,
            HEAD_DIM, VALUE_DIM, KV_HEADS, PAGE_SIZE, BLOCK_KEYS, part != 1, IS_FLOAT, WORDS, LEVELS,
        )  # fmt: skip
    column = tl.arange(0, COLUMNS)
    heads: tl.constexpr = KV_HEADS * SHARED
    places = ((start + query_index).to(tl.int64) * heads + head)[:, None] * VALUE_DIM + column[None, :]
    total = tl.where(total == 0, 1.0, total)  # rows without a query
    numbers = (whole_sums(sums, WORDS) * (1 / total)[:, None]).to(out.dtype.element_ty)
    tl.store(out + places, numbers, mask=in_rows[:, None] & (column < VALUE_DIM)[None, :])
