"""The kernel of the product in fragment order; `fragment_linear` explains and launches it.

Every tensor has one element per thread. A turn has 256 columns, each of its steps 64.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from zinfer.kernels import fragment_ptx as ptx
from zinfer.kernels.launching import device_function

_DEPTH = tl.constexpr(4)  # steps in a turn
_STAGES = tl.constexpr(2)  # turns of x in shared memory


@device_function
def _load(ptr, is_there):  # type: ignore[no-untyped-def]
    """Load codes of 32 rows and 64 columns: two tiles of 4 words; undefined if not ``is_there``."""
    WORDS: tl.constexpr = (tl.int32, tl.int32, tl.int32, tl.int32)
    low = tl.inline_asm_elementwise(ptx.LOAD, "=r,=r,=r,=r,l,r", [ptr, is_there], dtype=WORDS, is_pure=False, pack=1)
    high = tl.inline_asm_elementwise(
        ptx.LOAD, "=r,=r,=r,=r,l,r", [ptr + 512, is_there], dtype=WORDS, is_pure=False, pack=1
    )
    return low, high


@device_function
def _load_scales(ptr, is_there):  # type: ignore[no-untyped-def]
    """Load a word of scales for each of the two tiles, as a tuple each; undefined if not ``is_there``."""
    WORDS: tl.constexpr = (tl.int32, tl.int32)
    low, high = tl.inline_asm_elementwise(
        ptx.LOAD_SCALES, "=r,=r,l,r", [ptr, is_there], dtype=WORDS, is_pure=False, pack=1
    )
    return (low,), (high,)


@device_function
def _with_token(token, ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.inline_asm_elementwise(ASM, "=r,r", [token], dtype=tl.int32, is_pure=False, pack=1)


@device_function
def _read(address):  # type: ignore[no-untyped-def]
    WORDS: tl.constexpr = (tl.int32, tl.int32, tl.int32, tl.int32)
    return tl.inline_asm_elementwise(ptx.READ, "=r,=r,=r,=r,r", [address], dtype=WORDS, is_pure=False, pack=1)


@device_function
def _read_x(address, OCTETS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Read x of 64 columns: 8 words for each octet of tokens."""
    words = _read(address) + _read(address + 512)
    if OCTETS == 2:
        words = words + _read(address + 1024) + _read(address + 1536)
    return words


@device_function
def _stage(address, ptr, token, tokens, columns, OCTETS: tl.constexpr, THREADS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Start copying a turn of x into fragment order, 16 bytes of a thread's token at a time.

    The order is [step][octet][half of a step][8 tokens][4 times 16 bytes]; a thread's first 16 bytes are at ``ptr``.
    Missing tokens are skipped: stale shared memory reaches only their sums, which are not stored.
    """
    ASM: tl.constexpr = ptx.copy_asm()
    for ahead in tl.static_range(0, _DEPTH * OCTETS, THREADS // 64):  # octets
        source = ptr + (ahead // OCTETS * 128 + ahead % OCTETS * 16 * columns)
        is_there = (token + ahead % OCTETS * 8 < tokens).to(tl.int32)
        operands = [address + ahead * 1024, source, is_there]
        tl.inline_asm_elementwise(ASM, "=r,r,l,r", operands, dtype=tl.int32, is_pure=False, pack=1)


@device_function
def _accumulate(operands, sums, OCTETS: tl.constexpr, ASM: tl.constexpr, CONSTRAINTS: tl.constexpr):  # type: ignore[no-untyped-def]
    FOUR: tl.constexpr = (tl.float32, tl.float32, tl.float32, tl.float32)
    KINDS: tl.constexpr = FOUR if OCTETS == 1 else FOUR + FOUR
    return tl.inline_asm_elementwise(ASM, CONSTRAINTS, operands + sums, dtype=KINDS, is_pure=True, pack=1)


@device_function
def _turn(  # type: ignore[no-untyped-def]
    codes, scales, sums, none, token, next_codes_ptr, next_scales_ptr, has_next, address,
    IS_BFLOAT: tl.constexpr, OCTETS: tl.constexpr, STEPS_PER_GROUP: tl.constexpr,
):  # fmt: skip
    """Compute a turn whose codes and scales are in registers, and load those of the next turn, if any, into them."""
    MULTIPLY: tl.constexpr = ptx.multiply_asm(IS_BFLOAT, OCTETS)
    MULTIPLY_IO: tl.constexpr = ptx.constraints(OCTETS, 4 + 8 * OCTETS, 0)
    SCALE: tl.constexpr = ptx.scale_asm(IS_BFLOAT, OCTETS)
    SCALE_IO: tl.constexpr = ptx.constraints(OCTETS, 1, 4 * OCTETS)
    next_codes = ()
    next_scales = ()
    parts = (none, none)
    for step in tl.static_range(_DEPTH):
        x = _read_x(address + step * OCTETS * 1024, OCTETS)
        if step % STEPS_PER_GROUP == 0:
            parts = (none, none)
        low = _accumulate(codes[step][0] + x, parts[0], OCTETS, MULTIPLY, MULTIPLY_IO)
        high = _accumulate(codes[step][1] + x, parts[1], OCTETS, MULTIPLY, MULTIPLY_IO)
        parts = (low, high)
        next_codes += (_load(next_codes_ptr + step * 2048, has_next),)  # type: ignore[assignment]
        if step % STEPS_PER_GROUP == STEPS_PER_GROUP - 1:
            scale = scales[step // STEPS_PER_GROUP]
            low = _accumulate(scale[0] + low, sums[0], OCTETS, SCALE, SCALE_IO)
            high = _accumulate(scale[1] + high, sums[1], OCTETS, SCALE, SCALE_IO)
            sums = (low, high)
            ptr = next_scales_ptr + step // STEPS_PER_GROUP * 128
            next_scales += (_load_scales(ptr, has_next),)  # type: ignore[assignment]
        token = _with_token(token, ptx.FENCE)
    return next_codes, next_scales, sums


@device_function
def _exchange(sums, k_warp, own, others, OCTETS: tl.constexpr, THREADS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add the sums of two ranges of columns: the first range gets those of its warps' lower tiles, the other the rest.

    Each passes the other's part through its ``own`` shared memory, which is no longer read.
    """
    FOUR: tl.constexpr = (tl.float32, tl.float32, tl.float32, tl.float32)
    is_first = k_warp == 0
    for octet in tl.static_range(OCTETS):
        given = [own + octet * THREADS * 16]
        for i in tl.static_range(4):
            given += [tl.where(is_first, sums[1][octet * 4 + i], sums[0][octet * 4 + i])]
        tl.inline_asm_elementwise(ptx.WRITE, "=r,r,f,f,f,f", given, dtype=tl.int32, is_pure=False, pack=1)
    others = _with_token(others, ptx.meet_all_asm(THREADS, 2))
    values = ()
    for octet in tl.static_range(OCTETS):
        address = others + octet * THREADS * 16
        taken = tl.inline_asm_elementwise(ptx.READ, "=f,=f,=f,=f,r", [address], dtype=FOUR, is_pure=False, pack=1)
        for i in tl.static_range(4):
            mine = tl.where(is_first, sums[0][octet * 4 + i], sums[1][octet * 4 + i])
            values += (mine + taken[i],)  # type: ignore[assignment]
    return values


@device_function
def _finish(  # type: ignore[no-untyped-def]
    values, bias_ptr, out_ptr, sums_ptr, counters_ptr,
    tile, num_tiles, all_turns, thread, row, first_token, tokens, rows,
    OCTETS: tl.constexpr, COUNT: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """Write each thread's COUNT sums of a tile; the last program to finish adds the sums of all the tile's programs."""
    programs = tl.num_programs(0)
    first = ((tile * all_turns + 1) * programs - 1) // (num_tiles * all_turns)
    last = ((tile + 1) * all_turns * programs - 1) // (num_tiles * all_turns)
    is_last = True
    if first != last:
        # Number the pieces by program plus tile: the next program or the next tile uses the next piece.
        ptrs = sums_ptr + (tl.program_id(1) * (programs + num_tiles) + tile).to(tl.int64) * (COUNT * THREADS) + thread
        for i in tl.static_range(COUNT):
            tl.store(ptrs + (tl.program_id(0) * COUNT + i) * THREADS, values[i])
        tl.debug_barrier()  # all threads' sums are written before one of them counts
        counter_ptr = counters_ptr + tl.program_id(1) * num_tiles + tile
        is_last = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") == last - first
        if is_last:
            tl.store(counter_ptr, 0)
            total = ()
            for i in tl.static_range(COUNT):
                total += (tl.load(ptrs + (first * COUNT + i) * THREADS, cache_modifier=".cg"),)  # type: ignore[assignment]
            for other in range(first + 1, last + 1):
                added = ()
                for i in tl.static_range(COUNT):
                    further = tl.load(ptrs + (other * COUNT + i) * THREADS, cache_modifier=".cg")
                    added += (total[i] + further,)  # type: ignore[assignment]
                total = added
            values = total
    if is_last:
        token = first_token + thread % 4 * 2
        for i in tl.static_range(COUNT):
            at_row = row + (i // (4 * OCTETS) * 16 + i % 4 // 2 * 8)
            at_token = token + (i // 4 % OCTETS * 8 + i % 2)
            value = values[i]
            if bias_ptr is not None:
                value += tl.load(bias_ptr + at_row).to(tl.float32)
            place = at_token * rows + at_row
            tl.store(out_ptr + place, value.to(out_ptr.dtype.element_ty), mask=at_token < tokens)


@triton.jit(do_not_specialize=["share", "tokens", "all_turns"])
def fragment_kernel(  # type: ignore[no-untyped-def]
    x_ptr, codes_ptr, scales_ptr, bias_ptr, chosen_ptr, out_ptr, sums_ptr, counters_ptr,
    share, tokens, rows, columns, all_turns,
    IS_BFLOAT: tl.constexpr, OCTETS: tl.constexpr, STEPS_PER_GROUP: tl.constexpr,
    ROW_WARPS: tl.constexpr, K_WARPS: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Compute a tile of tokens for a stripe of the turns of all tiles of rows.

    With ``chosen_ptr`` the tile is a pair of one token, which has ``share`` pairs, and one of several matrices.
    """
    IS_CHOSEN: tl.constexpr = chosen_ptr is not None
    THREADS: tl.constexpr = ROW_WARPS * 32  # that share x
    X_BYTES: tl.constexpr = OCTETS * _DEPTH * 1024  # of a turn
    STEPS: tl.constexpr = K_WARPS * _DEPTH  # of 64 columns, of a turn
    COUNT: tl.constexpr = 8 * OCTETS // K_WARPS
    BLOCKS: tl.constexpr = ROW_WARPS // 2  # of 64 rows, of a tile
    total = rows // (32 * ROW_WARPS) * all_turns
    begin = tl.program_id(0) * total // tl.num_programs(0)
    end = (tl.program_id(0) + 1) * total // tl.num_programs(0)
    tile = begin // all_turns
    left = all_turns - begin % all_turns  # turns of the tile
    thread = tl.arange(0, THREADS * K_WARPS)
    lane, k_warp = thread % 32, thread // THREADS
    row_tile = tile * (2 * ROW_WARPS) + thread // 32 % ROW_WARPS * 2
    block = (row_tile // 4).to(tl.int64)
    first_token = tl.program_id(1) * (8 * OCTETS)
    if IS_CHOSEN:
        if IS_DEPENDENT:  # another kernel may have written the chosen experts
            gdc_wait()
        matrix = tl.load(chosen_ptr + tl.program_id(1)).to(tl.int64)
        block += matrix * (rows // 64)
        first_token = 0
        x_ptr += (tl.program_id(1) // share).to(tl.int64) * columns
        out_ptr += tl.program_id(1).to(tl.int64) * rows
        if bias_ptr is not None:
            bias_ptr += matrix * rows
    step = (all_turns - left) * STEPS + k_warp * _DEPTH
    codes_offset = (block * (columns // 64) + step) * 2048 + row_tile % 4 * 512 + lane * 16
    scales_offset = (block * (columns // 64) + step) // STEPS_PER_GROUP * 128 + lane // 4 * 16 + row_tile % 4 * 4
    codes_ptrs = codes_ptr.to(tl.pointer_type(tl.int8)) + codes_offset
    scales_ptrs = scales_ptr.to(tl.pointer_type(tl.int8)) + scales_offset
    one = thread * 0 + 1
    codes = ()
    scales = ()
    for ahead in tl.static_range(_DEPTH):
        codes += (_load(codes_ptrs + ahead * 2048, one),)  # type: ignore[assignment]
        if ahead % STEPS_PER_GROUP == 0:
            scales += (_load_scales(scales_ptrs + ahead // STEPS_PER_GROUP * 128, one),)  # type: ignore[assignment]
    place = thread % THREADS
    token = first_token + place // 64 % OCTETS * 8 + place % 32 // 4
    column = step * 64 + place // (64 * OCTETS) * 64 + place // 32 % 2 * 32 + place % 4 * 8
    x_ptrs = x_ptr.to(tl.pointer_type(tl.int8)) + (token * columns + column) * 2
    if IS_DEPENDENT:  # before this, touch no memory that another kernel may read or write
        if not IS_CHOSEN:
            gdc_wait()
        gdc_launch_dependents()
    memory = _with_token(thread, ptx.staging_asm(K_WARPS * (_STAGES * X_BYTES + THREADS * 16 * OCTETS)))
    own = memory + _STAGES * K_WARPS * X_BYTES + thread * 16 + k_warp * (THREADS * 16 * (OCTETS - 1))
    base = memory + k_warp * X_BYTES
    copy_to, read_from = base + place * 16, base + lane * 16
    _stage(copy_to, x_ptrs, token, tokens, columns, OCTETS, THREADS)
    zero = tl.zeros((THREADS * K_WARPS,), tl.float32)
    none = (zero, zero, zero, zero)
    if OCTETS == 2:
        none += none  # type: ignore[assignment]
    sums = (none, none)
    now, other = 0, K_WARPS * X_BYTES  # offsets of x of this turn and of the next
    for turn in range(begin, end):
        k_warp = _with_token(k_warp, ptx.meet_asm(ROW_WARPS, K_WARPS))
        has_next = turn + 1 < end
        is_over = left == 1
        x_ptrs += STEPS * 128 - tl.where(is_over, 2 * columns, 0)
        codes_ptrs += STEPS * 2048 + tl.where(is_over, (BLOCKS - 1) * (columns // 64) * 2048, 0)
        scales_ptrs += STEPS // STEPS_PER_GROUP * 128
        scales_ptrs += tl.where(is_over, (BLOCKS - 1) * (columns // 64 // STEPS_PER_GROUP) * 128, 0)
        _stage(copy_to + other, x_ptrs, token, tl.where(has_next, tokens, 0), columns, OCTETS, THREADS)
        codes, scales, sums = _turn(
            codes, scales, sums, none, thread, codes_ptrs, scales_ptrs, thread * 0 + has_next.to(tl.int32),
            read_from + now, IS_BFLOAT, OCTETS, STEPS_PER_GROUP,
        )  # fmt: skip
        now, other = other, now
        left -= 1
        if (left == 0) | (turn + 1 == end):
            if K_WARPS == 1:
                values = sums[0] + sums[1]
            else:
                values = _exchange(sums, k_warp, own, own + (1 - 2 * k_warp) * (THREADS * 16 * OCTETS), OCTETS, THREADS)
                own = _with_token(own, ptx.meet_all_asm(THREADS, 2))
            row = tile * THREADS + place // 32 * 32 + k_warp * 16 + lane // 4
            _finish(
                values, bias_ptr, out_ptr, sums_ptr, counters_ptr, tile, total // all_turns, all_turns, thread, row,
                first_token, tokens, rows, OCTETS, COUNT, THREADS * K_WARPS,
            )  # fmt: skip
            sums = (none, none)
            tile += 1
            left = all_turns
