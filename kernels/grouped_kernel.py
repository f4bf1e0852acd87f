"""The kernels of `grouped_linear`: a tile of tokens of one expert times some rows of that expert's matrix."""

import triton
import triton.language as tl

from zinfer.kernels.launching import device_function, dot
from zinfer.kernels.widening import scale_values, widen_bytes, widen_nibbles, widen_words


@device_function
def find_tile(ends_ptr, order_ptr, tile, experts, EXPERTS: tl.constexpr, BLOCK_TOKENS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the expert of a tile of tokens, its pairs, and a mask of valid ones; no expert past the last tile."""
    number = tl.arange(0, EXPERTS)
    end = tl.load(ends_ptr + number, mask=number < experts, other=0)
    begin = tl.load(ends_ptr + number - 1, mask=(number > 0) & (number < experts), other=0)
    tiles = (end - begin + BLOCK_TOKENS - 1) // BLOCK_TOKENS
    expert = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
    first_tile = tl.sum(tl.where(number < expert, tiles, 0), 0)
    is_it = number == expert
    place = tl.sum(tl.where(is_it, begin, 0), 0) + (tile - first_tile) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    inside = place < tl.sum(tl.where(is_it, end, 0), 0)
    return expert, tl.load(order_ptr + place, mask=inside, other=0), inside


@device_function
def _accumulate(weights, x, sums):  # type: ignore[no-untyped-def]
    """Add the products of weights [rows, columns] and x [tokens, columns] to sums [rows, tokens]."""
    return dot(weights.to(x.dtype), tl.trans(x), sums)


@device_function
def _multiply(  # type: ignore[no-untyped-def]
    parts, stored, zero, sums, high_sums,
    FORM: tl.constexpr, IS_BFLOAT: tl.constexpr, IS_FLOAT: tl.constexpr, HAS_ZERO: tl.constexpr,
):  # fmt: skip
    """Add a step's products to sums; in fragment order, rows in the high halves of bytes have their own sums."""
    if FORM == "bytes":
        weights = widen_bytes(stored, IS_BFLOAT, IS_FLOAT)
        if HAS_ZERO:
            weights -= (zero.to(tl.float32) - 128).to(weights.dtype)[:, None]
        return _accumulate(weights, parts[0], sums), high_sums
    elif FORM == "words":
        if HAS_ZERO:  # unsigned codes become signed ones, less 128
            stored ^= -0x7F7F7F80
        first, second, third, last = widen_words(stored, IS_BFLOAT, IS_FLOAT)
        if HAS_ZERO:
            centred = (zero.to(tl.float32) - 128).to(first.dtype)[:, None]
            first, second, third, last = first - centred, second - centred, third - centred, last - centred
        sums = _accumulate(second, parts[1], _accumulate(first, parts[0], sums))
        return _accumulate(last, parts[3], _accumulate(third, parts[2], sums)), high_sums
    else:
        low, high = widen_nibbles(stored, IS_BFLOAT)
        if HAS_ZERO:
            centred = (zero.to(tl.float32) - 8).to(low.dtype)[:, None]
            low, high = low - centred, high - centred
        sums = _accumulate(low, parts[0], sums)
        if FORM == "fragments":
            return sums, _accumulate(high, parts[0], high_sums)
        else:
            return _accumulate(high, parts[1], sums), high_sums


@device_function
def _find_fragments(stored_ptr, line, unit, expert, rows, width, groups):  # type: ignore[no-untyped-def]
    """Return the first rows of an expert's lines in fragment order, the pointers of units, and those of scales."""
    tile = expert.to(tl.int64) * (rows // 16) + tl.minimum(line // 8, rows // 16 - 1)
    line_ptrs = stored_ptr + tile // 4 * width * 32 + tile % 4 * 512 + line % 8 * 64
    scale_place = tile // 4 * groups * 64 + line % 8 * 8 + tile % 4 * 2
    return line // 8 * 16 + line % 8, line_ptrs[:, None] + (unit // 64 * 2048 + unit % 64)[None, :], scale_place


@device_function
def _find_rows(  # type: ignore[no-untyped-def]
    stored_ptr, line, unit, expert, rows, expert_stride, stride, groups,
    TRANSPOSED: tl.constexpr, GROUP_ROWS: tl.constexpr,
):  # fmt: skip
    """As `_find_fragments`, for rows or columns in plain order."""
    # Contiguous rows are masked, not clamped: clamped addresses would not be loaded 16 bytes at a time.
    stored_row = line.to(tl.int64) if TRANSPOSED else tl.minimum(line, rows - 1).to(tl.int64)
    line_ptrs = stored_ptr + expert.to(tl.int64) * expert_stride + stored_row * (1 if TRANSPOSED else stride)
    unit_places = unit * (stride if TRANSPOSED else 1)
    row = expert.to(tl.int64) * rows + stored_row
    return line, line_ptrs[:, None] + unit_places[None, :], (row // GROUP_ROWS if GROUP_ROWS else row * 0) * groups


@device_function
def _load_step(  # type: ignore[no-untyped-def]
    stored_ptrs, x_ptrs, step, step_places, unit, width, inside, row, rows, part,
    BLOCK: tl.constexpr, FORM: tl.constexpr, EVEN: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Load a step's units and x for them: a part of x for each column of a unit, at most four."""
    step_ptrs = stored_ptrs + step * step_places
    if EVEN:
        is_x = inside[:, None]
        stored = tl.load(step_ptrs, mask=(row < rows)[:, None], other=0) if TRANSPOSED else tl.load(step_ptrs)
    else:
        there = (unit < width - step * BLOCK)[None, :]
        is_x = inside[:, None] & there
        stored = tl.load(step_ptrs, mask=there & (row < rows)[:, None] if TRANSPOSED else there, other=0)
    NUM: tl.constexpr = 4 if FORM == "words" else 2 if FORM == "nibbles" else 1
    parts = ()
    for number in tl.static_range(NUM):
        parts += (tl.load(x_ptrs + number * part + step * BLOCK, mask=is_x, other=0),)  # type: ignore[assignment]
    return stored, parts


@device_function
def store_tile(out_ptr, bias_ptr, sums, expert, pair, inside, row, rows):  # type: ignore[no-untyped-def]
    """Write sums [rows, tokens] of some rows of an expert to their pairs' rows of the result."""
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + expert.to(tl.int64) * rows + row, mask=row < rows, other=0)
        sums += bias[:, None].to(tl.float32)
    places = pair[:, None].to(tl.int64) * rows + row[None, :]
    mask = inside[:, None] & (row < rows)[None, :]
    tl.store(out_ptr + places, tl.trans(sums).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["share", "experts", "token_tiles"])
def grouped_kernel(  # type: ignore[no-untyped-def]
    x_ptr, stored_ptr, scales_ptr, zeros_ptr, bias_ptr, out_ptr, order_ptr, ends_ptr,
    share, experts, token_tiles, rows, width, expert_stride, stride, groups, part,
    FORM: tl.constexpr, IS_FLOAT: tl.constexpr, IS_BFLOAT: tl.constexpr, ONE_GROUP: tl.constexpr,
    SCALES: tl.constexpr, GROUP_ROWS: tl.constexpr, STEPS_PER_GROUP: tl.constexpr, EVEN: tl.constexpr,
    TRANSPOSED: tl.constexpr, EXPERTS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute a tile of one expert's tokens and of rows of its matrix; tiles of the same rows run concurrently.

    A line is read in ``width`` units: it is a row or, in fragment order, two rows.
    """
    FRAGMENTS: tl.constexpr = FORM == "fragments"
    LINES: tl.constexpr = BLOCK_ROWS // 2 if FRAGMENTS else BLOCK_ROWS
    HAS_SCALE: tl.constexpr = scales_ptr is not None
    HAS_ZERO: tl.constexpr = zeros_ptr is not None
    expert, pair, inside = find_tile(
        ends_ptr, order_ptr, tl.program_id(0) % token_tiles, experts, EXPERTS, BLOCK_TOKENS
    )
    if expert >= experts:
        return
    line = tl.program_id(0) // token_tiles * LINES + tl.arange(0, LINES)
    unit = tl.arange(0, BLOCK)
    if FRAGMENTS:  # the second row of a line is the one 8 below
        row, stored_ptrs, scale_place = _find_fragments(stored_ptr, line, unit, expert, rows, width, groups)
        step_places = BLOCK * 32
    else:
        row, stored_ptrs, scale_place = _find_rows(
            stored_ptr, line, unit, expert, rows, expert_stride, stride, groups, TRANSPOSED, GROUP_ROWS
        )
        step_places = BLOCK * (stride if TRANSPOSED else 1)
    x_ptrs = x_ptr + (pair // share)[:, None].to(tl.int64) * width + unit[None, :]
    scale = line  # unused for full weights
    if HAS_SCALE:
        scale = tl.load(scales_ptr + scale_place)
    high_scale, zero = scale, scale
    if FRAGMENTS:
        high_scale = tl.load(scales_ptr + scale_place + 1)
    if HAS_ZERO:
        zero = tl.load(zeros_ptr + scale_place)
    none = tl.zeros((LINES, BLOCK_TOKENS), tl.float32)
    sums, high_sums = none, none
    for step in tl.range(0, tl.cdiv(width, BLOCK)):
        stored, parts = _load_step(
            stored_ptrs, x_ptrs, step, step_places, unit, width, inside, row, rows, part,
            BLOCK, FORM, EVEN, TRANSPOSED,
        )  # fmt: skip
        if FORM == "full":
            sums = _accumulate(stored, parts[0], sums)
        elif FORM == "words" and ONE_GROUP:
            # Four successive products are waited for one by one, so each may add to the previous ones.
            sums, high_sums = _multiply(parts, stored, zero, sums, none, FORM, IS_BFLOAT, IS_FLOAT, HAS_ZERO)
        else:
            # Codes are multiplied from registers. A product that adds to the previous one may still run when the next
            # codes overwrite them: sums were wrong on a GPU, in tiles of 128 tokens. Scaled products are waited for.
            product, high = _multiply(parts, stored, zero, none, none, FORM, IS_BFLOAT, IS_FLOAT, HAS_ZERO)
            sums += product * scale_values(scale[:, None], SCALES)
            if FRAGMENTS:
                high_sums += high * scale_values(high_scale[:, None], SCALES)
            if not ONE_GROUP:
                # The scales of a step are loaded one step ahead, since no asynchronous copy loads them early.
                group = tl.minimum((step + 1) // STEPS_PER_GROUP, groups - 1)
                next_place = scale_place + group * (64 if FRAGMENTS else 1)
                if FRAGMENTS:
                    high_scale = tl.load(scales_ptr + next_place + 1)
                if HAS_ZERO:
                    zero = tl.load(zeros_ptr + next_place)
                scale = tl.load(scales_ptr + next_place)
    if FORM == "words" and ONE_GROUP:
        sums *= scale_values(scale[:, None], SCALES)
    store_tile(out_ptr, bias_ptr, sums, expert, pair, inside, row, rows)
    if FRAGMENTS:
        store_tile(out_ptr, bias_ptr, high_sums, expert, pair, inside, row + 8, rows)


@triton.jit(do_not_specialize=["share", "first", "experts"])
def decoded_kernel(  # type: ignore[no-untyped-def]
    x_ptr, weights_ptr, bias_ptr, out_ptr, order_ptr, ends_ptr, share, first, experts, rows, width,
    EVEN: tl.constexpr, EXPERTS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Multiply with the full matrices of some experts from ``first`` on, [experts, rows, width] with many tokens each.

    Tiles are numbered by expert, then by rows: those that run concurrently read the same tokens and rows. Their number
    is known here alone, so a program takes one tile after the other.
    """
    number = tl.arange(0, EXPERTS)
    is_there = number < experts
    end = tl.load(ends_ptr + first + number, mask=is_there, other=0)
    begin = tl.load(ends_ptr + first + number - 1, mask=is_there & (first + number > 0), other=0)
    token_tiles = (end - begin + BLOCK_TOKENS - 1) // BLOCK_TOKENS
    tiles = token_tiles * tl.cdiv(rows, BLOCK_ROWS)
    last_tiles = tl.cumsum(tiles, 0)
    unit = tl.arange(0, BLOCK)
    for tile in range(tl.program_id(0), tl.sum(tiles, 0), tl.num_programs(0)):
        expert = tl.sum((last_tiles <= tile).to(tl.int32), 0)
        is_it = number == expert
        own_tiles = tl.sum(tl.where(is_it, token_tiles, 0), 0)
        own = tile - tl.sum(tl.where(is_it, last_tiles - tiles, 0), 0)
        place = tl.sum(tl.where(is_it, begin, 0), 0) + own % own_tiles * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
        inside = place < tl.sum(tl.where(is_it, end, 0), 0)
        pair = tl.load(order_ptr + place, mask=inside, other=0)
        row = own // own_tiles * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        line = expert.to(tl.int64) * rows + tl.minimum(row, rows - 1)
        weight_ptrs = weights_ptr + line[:, None] * width + unit[None, :]
        x_ptrs = x_ptr + (pair // share)[:, None].to(tl.int64) * width + unit[None, :]
        sums = tl.zeros((BLOCK_ROWS, BLOCK_TOKENS), tl.float32)
        for step in tl.range(0, tl.cdiv(width, BLOCK)):
            if EVEN:
                weights = tl.load(weight_ptrs + step * BLOCK)
                x = tl.load(x_ptrs + step * BLOCK, mask=inside[:, None], other=0)
            else:
                there = (unit < width - step * BLOCK)[None, :]
                weights = tl.load(weight_ptrs + step * BLOCK, mask=there, other=0)
                x = tl.load(x_ptrs + step * BLOCK, mask=inside[:, None] & there, other=0)
            sums = _accumulate(weights, x, sums)
        store_tile(out_ptr, bias_ptr, sums, first + expert, pair, inside, row, rows)
