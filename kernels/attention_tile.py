"""The inner loop of both attention kernels: some rows of queries against a range of keys, a tile at a time.

Rows are the queries of neighbouring tokens times the heads that share a KV head, so that keys are read once for all of
them. The softmax is computed online (Milakov and Gimelshein 2018; Dao 2023, "FlashAttention-2"), in powers of two.
Tiles of keys begin at multiples of their size in the sequence, whatever the pages' size; a key's page is looked up in
the table. Codes are multiplied without their scales: a key's scale multiplies its product, a value's its weight.

Codes may be read as words of four (WORDS), because tensor cores' operands load them faster: codes of one column are
apart in memory, but two words of two keys hold four such pairs. The four codes of a word go to four operands, and
queries and sums are split into four parts with every fourth column each; all columns below are columns of words.
"""

import triton.language as tl

from zinfer.kernels.launching import device_function, dot
from zinfer.kernels.widening import widen_bytes, widen_words

# The largest product of a row that has seen no key: finite, so that no difference is NaN.
_NOTHING = tl.constexpr(-1e30)
_LEAST_SCALE = tl.constexpr(2.0**-60)  # values whose scale is less may count as zeros
_SINK_LEVEL = tl.constexpr(-24.0)


@device_function
def _load_part(  # type: ignore[no-untyped-def]
    query, token, head, in_rows, query_token, query_head,
    HEAD_DIM: tl.constexpr, BEGIN: tl.constexpr, STEP: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Load queries [rows, COLUMNS], every STEP-th column from BEGIN on; zeros outside of the tensor."""
    pointers = query + (token.to(tl.int64) * query_token + head.to(tl.int64) * query_head)[:, None]
    column = BEGIN + STEP * tl.arange(0, COLUMNS)
    return tl.load(pointers + column[None, :], mask=in_rows[:, None] & (column < HEAD_DIM)[None, :], other=0)


@device_function
def load_rows(  # type: ignore[no-untyped-def]
    query, token, head, in_rows, query_token, query_head,
    HEAD_DIM: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Load the parts of queries: the first columns and the rest; or, for words, four parts of every fourth column."""
    NUM: tl.constexpr = 4 if WORDS else 1
    parts = ()
    for part in tl.static_range(NUM):
        loaded = _load_part(query, token, head, in_rows, query_token, query_head, HEAD_DIM, part, NUM, MAIN)
        parts += (loaded,)  # type: ignore[assignment]
    if REST > 0:
        rest = _load_part(query, token, head, in_rows, query_token, query_head, HEAD_DIM, MAIN, 1, REST)
        parts += (rest,)  # type: ignore[assignment]
    return parts


@device_function
def first_state(  # type: ignore[no-untyped-def]
    sinks, head, in_rows, factor, counts_sink,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WORDS: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Return the largest product, sum of weights and sums of weighted values before the first key.

    A sink is a product without a value; ``counts_sink`` is true in the one program that includes it.
    """
    most = tl.full((ROWS,), _NOTHING, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    if sinks is not None:
        sink = tl.load(sinks + head, mask=in_rows, other=0).to(tl.float32) * 1.4426950408889634
        counted = counts_sink & (sink > _NOTHING)
        level: tl.constexpr = _SINK_LEVEL if LEVELS else 0.0
        most = tl.where(counted, (sink + level) / factor, most)
        total = tl.where(counted, 2.0**-level, total)
    zeros = tl.zeros((ROWS, COLUMNS), tl.float32)
    return most, total, (zeros, zeros, zeros, zeros) if WORDS else (zeros,)


@device_function
def whole_sums(sums, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Join the parts of sums in the order of the values' columns."""
    if WORDS:
        return tl.interleave(tl.interleave(sums[0], sums[2]), tl.interleave(sums[1], sums[3]))
    else:
        return sums[0]


@device_function
def _load(pointers, seen, inside, MASKED: tl.constexpr, PADDED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load; zeros for keys that are not ``seen`` (if MASKED) and columns that are not ``inside`` (if PADDED)."""
    if MASKED and PADDED:
        return tl.load(pointers, mask=seen & inside, other=0)
    elif MASKED:
        return tl.load(pointers, mask=seen, other=0)
    elif PADDED:
        return tl.load(pointers, mask=inside, other=0)
    else:
        return tl.load(pointers)


@device_function
def _numbers(found, dtype: tl.constexpr, IS_FLOAT: tl.constexpr, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Convert page elements to a tuple in the query's dtype; exact for codes, which are whole numbers or e4m3."""
    if WORDS:
        return widen_words(found, dtype == tl.bfloat16, IS_FLOAT)
    elif found.dtype == tl.int8 or found.dtype == tl.uint8:
        return (widen_bytes(found, dtype == tl.bfloat16, IS_FLOAT).to(dtype),)
    else:
        return (found,)


@device_function
def _multiplied(parts, numbers):  # type: ignore[no-untyped-def]
    """Return the sum of the products of the parts of queries and keys."""
    found = dot(parts[0], numbers[0], None)
    for part in tl.static_range(1, len(numbers)):
        found = dot(parts[part], numbers[part], found)
    return found


@device_function
def _weighted(weights, numbers, sums, shrink):  # type: ignore[no-untyped-def]
    """Add a tile's weighted values to the sums, part by part."""
    found = ()
    for part in tl.static_range(len(numbers)):
        found += (dot(weights, numbers[part], sums[part] * shrink[:, None]),)  # type: ignore[assignment]
    return found


@device_function
def _page_of(table, start, end, PAGE_SIZE: tl.constexpr, BLOCK_KEYS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the pages of a tile's keys, a number if it is in one page; keys from ``end`` on get the last page."""
    last = tl.maximum(end - 1, 0)
    if PAGE_SIZE % BLOCK_KEYS == 0:
        return tl.load(table + tl.minimum(start, last) // PAGE_SIZE)
    else:
        return tl.load(table + tl.minimum(start + tl.arange(0, BLOCK_KEYS), last) // PAGE_SIZE)


@device_function
def _slots(page, start, stride, PAGE_SIZE: tl.constexpr, BLOCK_KEYS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the offsets of a tile's keys, with pages ``stride`` apart: a common offset (int64) and one per key.

    Keys of a tile in one page share most of the address.
    """
    if PAGE_SIZE % BLOCK_KEYS == 0:
        return page.to(tl.int64) * stride + start % PAGE_SIZE, tl.arange(0, BLOCK_KEYS)
    else:
        within = (start + tl.arange(0, BLOCK_KEYS)) % PAGE_SIZE
        return tl.full((), 0, tl.int64), page.to(tl.int64) * stride + within


@device_function
def _level(scale, factor):  # type: ignore[no-untyped-def]
    """Return the logarithm of a value's scale, to about a tenth, in units of products, from its bits as an integer."""
    bits = tl.maximum(scale, _LEAST_SCALE).to(tl.int32, bitcast=True)
    wide = ((bits >> 8) | 0x4B000000).to(tl.float32, bitcast=True)  # 2**23 + bits / 2**8
    return tl.fma(wide, 2.0**-15 / factor, -(2.0**8 + 127) / factor)


@device_function
def _finish(  # type: ignore[no-untyped-def]
    scores, place, key_place, slope, seen, scale, softcap, window, MASKED: tl.constexpr
):
    """Apply softcap, slopes and mask to products; without softcap and slopes they are not scaled yet."""
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


@device_function
def attend(  # type: ignore[no-untyped-def]
    most, total, sums,
    query, place, slope,
    begin, end, first,
    table, keys, values, key_scales, value_scales,
    KEY_TOKEN: tl.constexpr, VALUE_TOKEN: tl.constexpr,
    scale, factor, softcap, window,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KV_HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    MASKED: tl.constexpr, IS_FLOAT: tl.constexpr, WORDS: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Return the state after the keys from ``begin``, a multiple of BLOCK_KEYS, to ``end``; pointers are the head's.

    Args:
        query: the parts from `load_rows`.
        place: [rows], positions of the queries in the sequence.
        first: earlier keys are not read, and their pages not looked up.
        MASKED: whether a row may see only some of the keys; otherwise every row sees all keys, in whole tiles.
        LEVELS: the running maximum includes the logarithm of the value's scale: otherwise float16 weights times scales
            far below 1 would lose precision.
        total: [rows]; or [rows, BLOCK_KEYS], summed at the end, if warps would otherwise wait for each other.
    """
    dtype: tl.constexpr = query[0].dtype
    MAIN: tl.constexpr = query[0].shape[1]
    COLUMNS: tl.constexpr = sums[0].shape[1]
    DIM: tl.constexpr = HEAD_DIM // 4 if WORDS else HEAD_DIM
    NUM_VALUES: tl.constexpr = VALUE_DIM // 4 if WORDS else VALUE_DIM
    column, value_column = tl.arange(0, MAIN)[:, None], tl.arange(0, COLUMNS)[None, :]
    # Looked up a step ahead: copies of keys and values start steps ahead, and need the page number by then.
    page = _page_of(table, begin, end, PAGE_SIZE, BLOCK_KEYS)
    for start in tl.range(begin, end, BLOCK_KEYS):
        key_place = start + tl.arange(0, BLOCK_KEYS)
        seen = (key_place >= first) & (key_place < end)
        slot, within = _slots(page, start, PAGE_SIZE, PAGE_SIZE, BLOCK_KEYS)
        scale_slot, scale_within = _slots(page, start, PAGE_SIZE * KV_HEADS, PAGE_SIZE, BLOCK_KEYS)
        page = _page_of(table, start + BLOCK_KEYS, end, PAGE_SIZE, BLOCK_KEYS)
        # Loaded transposed, by their strides.
        key_ptrs = keys + slot * KEY_TOKEN + (within * KEY_TOKEN)[None, :]
        found = _load(key_ptrs + column, seen[None, :], column < DIM, MASKED, DIM < MAIN)
        scores = _multiplied(query, _numbers(found, dtype, IS_FLOAT, WORDS))
        if len(query) == 2:
            REST: tl.constexpr = query[1].shape[1]
            left = MAIN + tl.arange(0, REST)[:, None]
            found = _load(key_ptrs + left, seen[None, :], left < DIM, MASKED, DIM < MAIN + REST)
            number = _numbers(found, dtype, IS_FLOAT, WORDS)[0]
            scores = dot(query[1], number, scores)
        value_ptrs = values + slot * VALUE_TOKEN + (within * VALUE_TOKEN)[:, None] + value_column
        value = _load(value_ptrs, seen[:, None], value_column < NUM_VALUES, MASKED, NUM_VALUES < COLUMNS)
        if key_scales is not None:
            key_scale = _load(key_scales + scale_slot + scale_within, seen, seen, MASKED, False)
            scores *= key_scale[None, :]
        scores = _finish(scores, place, key_place, slope, seen, scale, softcap, window, MASKED)
        levelled = scores
        if value_scales is not None:
            value_scale = _load(value_scales + scale_slot + scale_within, seen, seen, MASKED, False)
            if LEVELS:
                levelled += _level(value_scale, factor)[None, :]
        now_most = tl.maximum(most, tl.max(levelled, axis=1))
        weights = tl.exp2(tl.fma(scores, factor, -(now_most * factor)[:, None]))
        shrink = tl.exp2((most - now_most) * factor)
        if len(total.shape) == 2:
            total = tl.fma(total, tl.broadcast_to(shrink[:, None], weights.shape), weights)
        else:
            total = total * shrink + tl.sum(weights, axis=1)
        most = now_most
        if value_scales is not None:
            weights *= value_scale[None, :]
        value = _numbers(value, dtype, IS_FLOAT, WORDS)
        sums = _weighted(weights.to(dtype), value, sums, shrink)
    return most, total, sums
