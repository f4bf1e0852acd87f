"""Attention of segments with one query: a segment's keys are split over programs, and a second kernel combines them.

All heads that share a KV head are rows of one tile. A segment's splits depend only on its own length, and are combined
in a fixed order: a query's result does not depend on the other segments of the pass.
"""

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

from zinfer.kernels.attention_arguments import AttentionRule, tile_arguments, words_fit
from zinfer.kernels.attention_tile import attend, first_state, load_rows, whole_sums
from zinfer.kernels.kv_pages import KVPages, PagedLayout
from zinfer.kernels.launching import (
    dependent_options,
    device_function,
    grid_dependency_wait,
    launch_dependents,
    on_device,
)


@dataclass(frozen=True)
class DecodeTiles:
    """A program's tile: keys of a step, approximate keys of a split, warps, and steps in flight."""

    keys: int
    split_keys: int
    warps: int
    stages: int


# By the wider of keys and values, up to so many columns. A split moves a few hundred kilobytes, long enough for its
# start and its sums, written and read again, to be a few percent.
_BY_COLUMNS: Final = {
    128: DecodeTiles(64, 1024, 2, 3),
    256: DecodeTiles(32, 512, 4, 3),
    1024: DecodeTiles(16, 512, 8, 2),
}
# Of codes as words: more warps than words have whole tiles of columns would do the same twice.
_WORDS_BY_COLUMNS: Final = {64: DecodeTiles(64, 512, 1, 3), **_BY_COLUMNS}
_WIDE: Final = DecodeTiles(16, 512, 4, 3)  # float32, without tensor cores
_MOST_SPLITS: Final = 16  # of a segment; longer ones have longer splits, so that their sums fit in one tile
_WORKSPACE_BYTES: Final = 64 << 20  # of sums that wait to be combined; more segments are taken in turns
_FEWEST_ROWS: Final = 16  # of a tensor core's operand
_MOST_ROWS: Final = 64


def decode_tiles_for(head_dim: int, value_dim: int, dtype: torch.dtype, words: bool) -> DecodeTiles:
    """Return the tiles for a model's heads and dtype, and for codes that are read as words."""
    if dtype == torch.float32:
        return _WIDE
    by_columns = _WORDS_BY_COLUMNS if words else _BY_COLUMNS
    return by_columns[min(most for most in by_columns if most >= max(head_dim, value_dim))]


def decode_attention(
    query: torch.Tensor,
    pages: KVPages,
    layout: PagedLayout,
    rule: AttentionRule,
    out: torch.Tensor,
    tiles: DecodeTiles | None = None,
) -> None:
    """Fill the rows of ``out`` that belong to segments of one query, on a GPU or under Triton's interpreter.

    Args:
        query: [tokens, heads, head_dim], columns contiguous.
        layout: segments from `num_decodes` on are skipped; if it is None, segments of several queries are.
        out: [tokens, heads, value_dim], contiguous.
        tiles: to use instead of the table's.
    """
    _, heads, value_dim = out.shape
    kv_heads = pages.values.shape[2]
    shared = heads // kv_heads
    words = words_fit(pages, query.dtype)
    tiles = tiles or decode_tiles_for(query.shape[2], value_dim, query.dtype, words)
    segments = layout.context_lengths.shape[0] if layout.num_decodes is None else layout.num_decodes
    most_seen = layout.most_context if rule.window is None else min(layout.most_context, rule.window + tiles.keys)
    splits = min(max((most_seen + tiles.split_keys // 2) // tiles.split_keys, 1), _MOST_SPLITS)
    segment_bytes = splits * heads * (value_dim + 2) * 4
    turns = 1 if splits == 1 else triton.cdiv(segments * segment_bytes, _WORKSPACE_BYTES)
    at_once = max(triton.cdiv(segments, max(turns, 1)), 1)
    rows = min(max(triton.next_power_of_2(shared), _FEWEST_ROWS), _MOST_ROWS)
    arguments = tile_arguments(query, pages, layout, rule, words)
    common = {
        "out": out,
        "splits": splits,
        "SPLIT_KEYS": tiles.split_keys,
        "MOST_SPLITS": _MOST_SPLITS,
        "SKIP_OTHERS": layout.num_decodes is None,
        "BLOCK_KEYS": tiles.keys,
        **dependent_options(query.device),
    }
    for first in range(0, segments, at_once):
        count = min(at_once, segments - first)
        place = (count if splits > 1 else 0, splits, heads)
        sums = torch.empty((*place, value_dim), dtype=torch.float32, device=out.device)
        parts = torch.empty((*place, 2), dtype=torch.float32, device=out.device)
        with on_device(query):
            _decode_kernel[(kv_heads * triton.cdiv(shared, rows) * count, splits)](
                **arguments,
                **common,
                sums_out=sums,
                parts_out=parts,
                first_segment=first,
                ROWS=rows,
                num_warps=tiles.warps,
                num_stages=tiles.stages,
            )
            if splits > 1:
                _combine_kernel[(heads, count)](
                    **common,
                    sums_in=sums,
                    parts_in=parts,
                    starts=layout.query_starts,
                    lengths=layout.context_lengths,
                    window=rule.window,
                    first_segment=first,
                    HEADS=heads,
                    VALUE_DIM=value_dim,
                    COLUMNS=triton.next_power_of_2(value_dim),
                    num_warps=1,
                )


@device_function
def _split_of(  # type: ignore[no-untyped-def]
    length, window, SPLIT_KEYS: tl.constexpr, MOST_SPLITS: tl.constexpr, BLOCK_KEYS: tl.constexpr
):
    """Return the first key that a segment's query sees, the start of its first tile, and the number of keys of a split.

    Splits are nearly equal, and have about SPLIT_KEYS keys: a few more do not start another split.
    """
    first = length * 0
    if window is not None:
        first = tl.maximum(length - window, 0)
    begin = first // BLOCK_KEYS * BLOCK_KEYS
    splits = tl.minimum(tl.maximum((length - begin + SPLIT_KEYS // 2) // SPLIT_KEYS, 1), MOST_SPLITS)
    return first, begin, tl.cdiv(length - begin, splits * BLOCK_KEYS) * BLOCK_KEYS


@triton.jit(do_not_specialize=["table_row", "first_segment", "splits"])
def _decode_kernel(  # type: ignore[no-untyped-def]
    query, out, sums_out, parts_out, starts, lengths, table, keys, values, key_scales, value_scales, slopes, sinks,
    query_token, query_head, table_row,
    scale, factor, softcap, window,
    first_segment, splits,
    KEY_TOKEN: tl.constexpr, KEY_HEAD: tl.constexpr, VALUE_TOKEN: tl.constexpr, VALUE_HEAD: tl.constexpr,
    KV_HEADS: tl.constexpr, SHARED: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    MAIN: tl.constexpr, REST: tl.constexpr, COLUMNS: tl.constexpr, PAGE_SIZE: tl.constexpr,
    SPLIT_KEYS: tl.constexpr, MOST_SPLITS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    SKIP_OTHERS: tl.constexpr, IS_FLOAT: tl.constexpr, WORDS: tl.constexpr, LEVELS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Compute a split of a segment's keys for a tile's heads; heads whose keys share memory sectors run together."""
    launch_dependents(IS_DEPENDENT)
    grid_dependency_wait(IS_DEPENDENT)
    head_tiles: tl.constexpr = KV_HEADS * ((SHARED + ROWS - 1) // ROWS)
    heads: tl.constexpr = KV_HEADS * SHARED
    local, split = tl.program_id(0) // head_tiles, tl.program_id(1)
    segment = first_segment + local
    token = tl.load(starts + segment)
    if SKIP_OTHERS and tl.load(starts + segment + 1) - token != 1:
        return
    length = tl.load(lengths + segment)
    first, begin, split_keys = _split_of(length, window, SPLIT_KEYS, MOST_SPLITS, BLOCK_KEYS)
    split_begin = begin + split * split_keys
    if split_begin >= length:
        return
    row = tl.arange(0, ROWS)
    kv_head = tl.program_id(0) % KV_HEADS
    shared = tl.program_id(0) % head_tiles // KV_HEADS * ROWS + row
    in_rows = shared < SHARED
    head = kv_head * SHARED + shared
    parts = load_rows(query, token + row * 0, head, in_rows, query_token, query_head, HEAD_DIM, MAIN, REST, WORDS)
    slope = None
    if slopes is not None:
        slope = tl.load(slopes + head, mask=in_rows, other=0).to(tl.float32)
    most, total, sums = first_state(sinks, head, in_rows, factor, split == 0, ROWS, COLUMNS, WORDS, LEVELS)
    if key_scales is not None:
        key_scales += kv_head * PAGE_SIZE
        value_scales += kv_head * PAGE_SIZE
    total = tl.where(tl.arange(0, BLOCK_KEYS)[None, :] == 0, total[:, None], 0.0)
    end = tl.minimum(split_begin + split_keys, length)
    # Keys from a window's first tile and those of the last one may be hidden.
    seen_by_all_end = split_begin if window is not None else end // BLOCK_KEYS * BLOCK_KEYS
    for part in tl.static_range(0 if window is None else 1, 2):
        start = split_begin if part == 0 else seen_by_all_end
        stop = seen_by_all_end if part == 0 else end
        most, total, sums = attend(
            most, total, sums, parts, row * 0 + length - 1, slope, start, stop, first,
            table + segment.to(tl.int64) * table_row, keys + kv_head * KEY_HEAD, values + kv_head * VALUE_HEAD,
            key_scales, value_scales, KEY_TOKEN, VALUE_TOKEN,
            scale, factor, softcap, window,
            HEAD_DIM, VALUE_DIM, KV_HEADS, PAGE_SIZE, BLOCK_KEYS, part == 1, IS_FLOAT, WORDS, LEVELS,
        )  # fmt: skip
    sums, total = whole_sums(sums, WORDS), tl.sum(total, axis=1)
    column = tl.arange(0, sums.shape[1])
    inside = in_rows[:, None] & (column < VALUE_DIM)[None, :]
    if length - begin <= split_keys:
        places = (token.to(tl.int64) * heads + head)[:, None] * VALUE_DIM + column[None, :]
        tl.store(out + places, (sums * (1 / total)[:, None]).to(out.dtype.element_ty), mask=inside)
    else:
        place = (local.to(tl.int64) * splits + split) * heads + head
        tl.store(sums_out + place[:, None] * VALUE_DIM + column[None, :], sums, mask=inside)
        tl.store(parts_out + place * 2, most * factor, mask=in_rows)
        tl.store(parts_out + place * 2 + 1, total, mask=in_rows)


@triton.jit(do_not_specialize=["first_segment", "splits"])
def _combine_kernel(  # type: ignore[no-untyped-def]
    out, sums_in, parts_in, starts, lengths, window, first_segment, splits,
    HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, COLUMNS: tl.constexpr,
    SPLIT_KEYS: tl.constexpr, MOST_SPLITS: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    SKIP_OTHERS: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Combine the splits of one head of a segment, in a tile of the maximum number of splits, so the order is fixed."""
    launch_dependents(IS_DEPENDENT)
    grid_dependency_wait(IS_DEPENDENT)
    head, local = tl.program_id(0), tl.program_id(1)
    segment = first_segment + local
    token = tl.load(starts + segment)
    if SKIP_OTHERS and tl.load(starts + segment + 1) - token != 1:
        return
    length = tl.load(lengths + segment)
    _, begin, split_keys = _split_of(length, window, SPLIT_KEYS, MOST_SPLITS, BLOCK_KEYS)
    if length - begin <= split_keys:
        return
    split = tl.arange(0, MOST_SPLITS)
    there = split < tl.cdiv(length - begin, split_keys)
    place = (local.to(tl.int64) * splits + split) * HEADS + head
    most = tl.load(parts_in + place * 2, mask=there, other=float("-inf"))
    total = tl.load(parts_in + place * 2 + 1, mask=there, other=0)
    column = tl.arange(0, COLUMNS)
    sums = tl.load(
        sums_in + place[:, None] * VALUE_DIM + column[None, :],
        mask=there[:, None] & (column < VALUE_DIM)[None, :],
        other=0,
    )
    share = tl.exp2(most - tl.max(most, axis=0))
    found = tl.sum(sums * share[:, None], axis=0) / tl.sum(total * share, axis=0)
    places = (token.to(tl.int64) * HEADS + head) * VALUE_DIM + column
    tl.store(out + places, found.to(out.dtype.element_ty), mask=column < VALUE_DIM)
