"""What a program of either attention kernel does: some rows of queries against a range of keys, a tile at a time.

Rows are the queries of neighbouring tokens times the heads that share a head of keys, so that keys are read once for
all of them. Softmax is taken as it goes (Milakov and Gimelshein 2018; Dao 2023, "FlashAttention-2"), in powers of two.
Tiles of keys lie at multiples of their size in the sequence, whatever the pages' size; a key's page is looked up in the
table. Codes are multiplied bare: the scale of a key goes to its product, that of a value to its weight.
"""

from typing import Any, Final

import torch
import triton
import triton.language as tl

from zinfer.kernels.attention_rule import AttentionRule
from zinfer.kernels.dequantize import INTERPRETED, widen_bytes
from zinfer.kernels.kv_pages import KV_CODES, KVPages, PagedLayout

_LOG2_E: Final = 1.4426950408889634
_LEAST_DIM: Final = 16  # of a tensor core's operand
_NOTHING = tl.constexpr(
    -1e30
)  # the largest product of a row that has seen no key: finite, so that no difference is NaN
_LEAST_UNIT = tl.constexpr(1e-30)  # values whose scale is less count as zeros


def tile_arguments(query: torch.Tensor, pages: KVPages, layout: PagedLayout, rule: AttentionRule) -> dict[str, Any]:
    """The arguments that both kernels take, by name.

    `factor` is what turns products, and with a softcap or slopes finished ones, into powers of two.
    """
    heads, head_dim = query.shape[1:]
    kv_heads, value_dim = pages.values.shape[2:]
    assert heads % kv_heads == 0, "neighbouring heads share one of keys"
    assert head_dim == pages.keys.shape[3], "queries as wide as keys"
    assert rule.scale > 0, "products in the order of their weights"
    assert triton.next_power_of_2(pages.page_size) == pages.page_size, "pages of a power of two"
    assert query.dtype == pages.keys.dtype or pages.keys.dtype in KV_CODES, "keys like queries, or codes"
    assert pages.is_flat, "pages beside each other"
    main = max(_LEAST_DIM, 1 << head_dim.bit_length() - 1)
    finished = rule.softcap is not None or rule.alibi_slopes is not None
    return {
        "query": query,
        "starts": layout.query_starts,
        "lengths": layout.context_lengths,
        "table": layout.page_table,
        "keys": _bits(pages.keys),
        "values": _bits(pages.values),
        "key_scales": pages.key_scales,
        "value_scales": pages.value_scales,
        "slopes": rule.alibi_slopes,
        "sinks": rule.sinks,
        "query_token": query.stride(0),
        "query_head": query.stride(1),
        "table_row": layout.page_table.stride(0),
        "key_token": pages.keys.stride(1),
        "key_head": pages.keys.stride(2),
        "value_token": pages.values.stride(1),
        "value_head": pages.values.stride(2),
        "scale": rule.scale,
        "factor": _LOG2_E if finished else rule.scale * _LOG2_E,
        "softcap": rule.softcap,
        "window": rule.window,
        "KV_HEADS": kv_heads,
        "SHARED": heads // kv_heads,
        "HEAD_DIM": head_dim,
        "VALUE_DIM": value_dim,
        "MAIN": main,
        "REST": max(_LEAST_DIM, triton.next_power_of_2(head_dim - main)) if head_dim > main else 0,
        "PAGE_SIZE": pages.page_size,
        "UNITS": pages.value_scales is not None and query.dtype == torch.float16,
        "COMPILED": not INTERPRETED,
    }


def _bits(codes: torch.Tensor) -> torch.Tensor:
    """E4m3 numbers as their bits, for which a masked load has a zero; others as they are."""
    return codes.view(torch.uint8) if codes.dtype == torch.float8_e4m3fn else codes


@triton.jit
def load_rows(  # type: ignore[no-untyped-def]
    query, token, head, in_rows, query_token, query_head,
    HEAD_DIM: tl.constexpr, BEGIN: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Queries [rows, COLUMNS] from column BEGIN on; zeros for rows that are none and columns that they do not have."""
    pointers = query + (token.to(tl.int64) * query_token + head.to(tl.int64) * query_head)[:, None]
    column = BEGIN + tl.arange(0, COLUMNS)
    return tl.load(pointers + column[None, :], mask=in_rows[:, None] & (column < HEAD_DIM)[None, :], other=0)


@triton.jit
def first_state(  # type: ignore[no-untyped-def]
    sinks, head, in_rows, factor, counts_sink, ROWS: tl.constexpr, COLUMNS: tl.constexpr, UNITS: tl.constexpr
):
    """Largest product, sum of weights, sum of weighted values and unit of their scales, before any key is seen.

    A sink is a product without a value; ``counts_sink`` says whether this program is the one that counts it.
    """
    most = tl.full((ROWS,), _NOTHING, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    if sinks is not None:
        sink = tl.load(sinks + head, mask=in_rows, other=0).to(tl.float32) * 1.4426950408889634
        counted = counts_sink & (sink > _NOTHING)
        most = tl.where(counted, sink / factor, most)
        total = tl.where(counted, 1.0, total)
    return most, total, tl.zeros((ROWS, COLUMNS), tl.float32), tl.full((), _LEAST_UNIT if UNITS else 1.0, tl.float32)


@triton.jit
def _load(pointers, seen, inside, MASKED: tl.constexpr, PADDED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Zeros for keys that are not ``seen`` (if MASKED) and columns that are not ``inside`` (if PADDED)."""
    if MASKED and PADDED:
        return tl.load(pointers, mask=seen & inside, other=0)
    elif MASKED:
        return tl.load(pointers, mask=seen, other=0)
    elif PADDED:
        return tl.load(pointers, mask=inside, other=0)
    else:
        return tl.load(pointers)


@triton.jit
def _dot(left, right, sums, COMPILED: tl.constexpr):  # type: ignore[no-untyped-def]
    if not COMPILED:  # the interpreter has no arithmetic for bfloat16
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, sums, input_precision="ieee")


@triton.jit
def _numbers(found, dtype: tl.constexpr, COMPILED: tl.constexpr):  # type: ignore[no-untyped-def]
    """What pages hold as numbers of the query's dtype: bare codes are whole numbers or e4m3, and exact."""
    if found.dtype == tl.int8 or found.dtype == tl.uint8:
        return widen_bytes(found, dtype == tl.bfloat16, found.dtype == tl.uint8, COMPILED).to(dtype)
    else:
        return found


@triton.jit
def _page_of(table, start, end, PAGE_SIZE: tl.constexpr, BLOCK_KEYS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The pages of a tile's keys, one number where tiles lie in one page; for keys from ``end`` on its last page."""
    last = tl.maximum(end - 1, 0)
    if PAGE_SIZE % BLOCK_KEYS == 0:
        return tl.load(table + tl.minimum(start, last) // PAGE_SIZE)
    else:
        return tl.load(table + tl.minimum(start + tl.arange(0, BLOCK_KEYS), last) // PAGE_SIZE)


@triton.jit
def _slots(page, start, PAGE_SIZE: tl.constexpr, BLOCK_KEYS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where a tile's keys lie among all pages' tokens: a number (int64) and what is to be added, key by key.

    Tiles that lie in one page have most of the address in common.
    """
    if PAGE_SIZE % BLOCK_KEYS == 0:
        return page.to(tl.int64) * PAGE_SIZE + start % PAGE_SIZE, tl.arange(0, BLOCK_KEYS)
    else:
        within = (start + tl.arange(0, BLOCK_KEYS)) % PAGE_SIZE
        return tl.full((), 0, tl.int64), page.to(tl.int64) * PAGE_SIZE + within


@triton.jit
def _finish(  # type: ignore[no-untyped-def]
    scores, place, key_place, slope, seen, scale, softcap, window, MASKED: tl.constexpr
):
    """Products with softcap, slopes and mask; not yet scaled where there is neither softcap nor slope."""
    if softcap is not None:
        turned = tl.exp2(scores * (scale / softcap * 2.8853900817779268))  # exp(2 x)
        scores = softcap * (1 - 2 / (1 + turned))  # tanh(x)
    elif slope is not None:
        scores *= scale
    if slope is not None:
        scores -= slope[:, None] * (place[:, None] - key_place[None, :]).to(tl.float32)
    if MASKED:
        visible = seen[None, :] & (key_place[None, :] <= place[:, None])
        if window is not None:
            visible &= key_place[None, :] > place[:, None] - window
        scores = tl.where(visible, scores, float("-inf"))
    return scores


@triton.jit
def attend(  # type: ignore[no-untyped-def]
    most, total, sums, unit,
    query, rest, place, slope,
    begin, end, first,
    table, keys, values, key_scales, value_scales,
    key_token, value_token, scale_token,
    scale, factor, softcap, window,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    MASKED: tl.constexpr, UNITS: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """The state after the keys from ``begin``, a multiple of BLOCK_KEYS, to ``end``; pointers stand at the head.

    Args:
        place: [rows], of the queries in the sequence.
        first: keys before it are not read, nor are their pages looked up.
        MASKED: whether a row may see only some of the keys; without it every row sees all, whole tiles.
        UNITS: sums are in units of ``unit``, the largest scale of a value so far; in float16 weights times scales far
            below 1 would lose places.
    """
    MAIN: tl.constexpr = query.shape[1]
    COLUMNS: tl.constexpr = sums.shape[1]
    column, value_column = tl.arange(0, MAIN)[:, None], tl.arange(0, COLUMNS)[None, :]
    # Looked up a step ahead: copies of keys and values are begun steps ahead, and could not be with the number to come.
    page = _page_of(table, begin, end, PAGE_SIZE, BLOCK_KEYS)
    for start in tl.range(begin, end, BLOCK_KEYS):
        key_place = start + tl.arange(0, BLOCK_KEYS)
        seen = (key_place >= first) & (key_place < end)
        slot, within = _slots(page, start, PAGE_SIZE, BLOCK_KEYS)
        page = _page_of(table, start + BLOCK_KEYS, end, PAGE_SIZE, BLOCK_KEYS)
        # Loaded transposed, by their strides.
        key_ptrs = keys + slot * key_token + (within * key_token)[None, :]
        found = _load(key_ptrs + column, seen[None, :], column < HEAD_DIM, MASKED, HEAD_DIM < MAIN)
        scores = _dot(query, _numbers(found, query.dtype, COMPILED), None, COMPILED)
        if rest is not None:
            REST: tl.constexpr = rest.shape[1]
            left = MAIN + tl.arange(0, REST)[:, None]
            found = _load(key_ptrs + left, seen[None, :], left < HEAD_DIM, MASKED, HEAD_DIM < MAIN + REST)
            scores = _dot(rest, _numbers(found, query.dtype, COMPILED), scores, COMPILED)
        value_ptrs = values + slot * value_token + (within * value_token)[:, None] + value_column
        value = _load(value_ptrs, seen[:, None], value_column < VALUE_DIM, MASKED, VALUE_DIM < COLUMNS)
        if key_scales is not None:
            key_scale = _load(key_scales + slot * scale_token + within * scale_token, seen, seen, MASKED, False)
            scores *= key_scale[None, :]
        scores = _finish(scores, place, key_place, slope, seen, scale, softcap, window, MASKED)
        now_most = tl.maximum(most, tl.max(scores, axis=1))
        weights = tl.exp2(tl.fma(scores, factor, -(now_most * factor)[:, None]))
        shrink = tl.exp2((most - now_most) * factor)
        total = total * shrink + tl.sum(weights, axis=1)
        most = now_most
        if value_scales is not None:
            value_scale = _load(value_scales + slot * scale_token + within * scale_token, seen, seen, MASKED, False)
            if UNITS:
                now_unit = tl.maximum(unit, tl.max(value_scale, axis=0))
                value_scale /= now_unit
                shrink *= unit / now_unit
                unit = now_unit
            weights *= value_scale[None, :]
        value = _numbers(value, query.dtype, COMPILED)
        sums = _dot(weights.to(query.dtype), value, sums * shrink[:, None], COMPILED)
    return most, total, sums, unit
