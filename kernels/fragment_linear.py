"""Multiplies few tokens with a matrix in the order of fragments, straight from memory into tensor cores.

After Marlin (Frantar et al. 2024, arXiv 2408.11743). A warp takes 32 rows; each of its lanes loads the 16 bytes of
codes that it multiplies with, a turn of 256 columns ahead, and widens them in its registers. x is what the warps share:
it is copied to shared memory, a turn ahead too, straight into the order of fragments. Whole numbers are multiplied, and
the sum over each group is scaled. Inline PTX says all that: in Triton's own language threads have no registers, and
what tensor cores take passes through shared memory.

Sums are taken in a fixed order: where programs share rows, the one that comes last adds all their sums, first to last.
The same arguments give the same bits. Launches are dependent ones (compute capability 9.0): the first codes are loaded
while the kernel before still runs, and only what may be its result is waited for.

From 17 tokens on tiles of 16 run beside each other, so that the codes of one are
in the cache for the others: it takes at most as long as a call for each.
"""

from dataclasses import dataclass
from functools import cache
from typing import Final

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from zinfer.kernels import fragment_ptx as ptx
from zinfer.kernels.dequantize import INTERPRETED, has_kernels, on_device
from zinfer.kernels.quantized import FRAGMENT_COLUMNS, QuantizedMatrix

_TILE_TOKENS: Final = 16
_WARP_ROWS: Final = 32
_WARPS_AT_ONCE: Final = 16  # of a multiprocessor
_MOST_REGISTERS: Final = 128  # of a thread, so that they have room
_MOST_PARTS: Final = 16  # that a row's columns are split into: their sums are written and read again
_NUM_COUNTERS: Final = 1 << 14
_ALIGNMENT: Final = 16  # bytes that are copied at a time
_LEAST_CAPABILITY: Final = (8, 0)
_DEPENDENT_CAPABILITY: Final = (9, 0)

_DEPTH = tl.constexpr(4)  # steps of 64 columns in a turn
_STAGES = tl.constexpr(2)  # turns of x in shared memory


@dataclass(frozen=True)
class FragmentCut:
    """A product cut into programs: ``num_tiles`` of rows and tokens, each shared by ``parts`` programs.

    A program has ``row_warps`` times ``k_warps`` warps; the latter share a row's columns, ``turns`` turns of each.
    """

    row_warps: int
    k_warps: int
    turns: int
    num_tiles: int
    parts: int

    @classmethod
    def of(cls, tokens: int, rows: int, columns: int, processors: int) -> "FragmentCut":
        """For x [tokens, columns] on so many multiprocessors: as many programs as run at once, if there are columns."""
        row_warps = 4 if rows % (4 * _WARP_ROWS) == 0 else 2
        k_warps = 2 if columns % (2 * FRAGMENT_COLUMNS) == 0 else 1
        turns = columns // (k_warps * FRAGMENT_COLUMNS)
        num_tiles = rows // (row_warps * _WARP_ROWS) * -(-tokens // _TILE_TOKENS)
        programs = processors * _WARPS_AT_ONCE // (row_warps * k_warps)
        parts = max(1, min(programs // max(num_tiles, 1), turns, _MOST_PARTS))
        return cls(row_warps, k_warps, turns, num_tiles, parts)


def can_multiply(matrix: QuantizedMatrix) -> bool:
    """Whether the kernel takes the matrix: in the order of fragments, in half precision, on a GPU that has the PTX."""
    return (
        matrix.format.in_fragments
        and matrix.dtype in (torch.float16, torch.bfloat16)
        and has_kernels(matrix)
        and not INTERPRETED
        and _device_facts(matrix.codes.device)[0] >= _LEAST_CAPABILITY
    )


def fragment_linear(
    x: torch.Tensor, matrix: QuantizedMatrix, bias: torch.Tensor | None = None, parts: int | None = None
) -> torch.Tensor:
    """``x @ W.T + bias`` with the values of ``matrix`` for W, sums in float32.

    The matrix must not be what the very last kernel before has written, for that is not waited for: one kernel of
    another kind between the two, or a copy engine as the writer, is enough.

    Args:
        x: [..., columns], of the matrix's dtype and device.
        matrix: one that `can_multiply` names.
        bias: [rows].
        parts: programs that share a row's columns, at most its turns; by default `FragmentCut` has them.
    """
    assert matrix.format.in_fragments
    assert matrix.column_scales is matrix.column_order is None, "x is to be scaled and ordered"
    flat = x.reshape(-1, matrix.columns).contiguous()
    if flat.data_ptr() % _ALIGNMENT:
        flat = flat.clone()
    out = torch.empty((flat.shape[0], matrix.rows), dtype=x.dtype, device=x.device)
    if out.numel() and matrix.columns:
        with on_device(x):
            _launch(flat, matrix, bias, out, parts)
    return out.view(*x.shape[:-1], matrix.rows)


def _launch(
    x: torch.Tensor, matrix: QuantizedMatrix, bias: torch.Tensor | None, out: torch.Tensor, parts: int | None
) -> None:
    """Fill out [tokens, rows] for x [tokens, columns]."""
    assert matrix.codes.is_contiguous()
    assert matrix.scales.is_contiguous()
    assert matrix.codes.data_ptr() % _ALIGNMENT == matrix.scales.data_ptr() % _ALIGNMENT == 0
    capability, processors = _device_facts(x.device)
    is_dependent = capability >= _DEPENDENT_CAPABILITY
    tokens, rows = out.shape
    cut = FragmentCut.of(tokens, rows, matrix.columns, processors)
    parts = parts or cut.parts
    assert parts <= cut.turns
    sums = counters = None
    if parts > 1:
        sums = torch.empty((parts, *out.shape), dtype=torch.float32, device=x.device)
        counters = _counters(x.device)
        assert cut.num_tiles <= len(counters)
    _fragment_kernel[(cut.num_tiles * parts,)](
        x,
        matrix.codes,
        matrix.scales,
        None if bias is None else bias.contiguous(),
        out,
        sums,
        counters,
        tokens,
        rows,
        matrix.columns,
        cut.turns,
        IS_BFLOAT=x.dtype == torch.bfloat16,
        PARTS=parts,
        OCTETS=1 if tokens <= _TILE_TOKENS // 2 else 2,
        STEPS_PER_GROUP=matrix.columns // matrix.scales.shape[1] // 64,
        ROW_WARPS=cut.row_warps,
        K_WARPS=cut.k_warps,
        IS_DEPENDENT=is_dependent,
        launch_pdl=is_dependent,
        num_warps=cut.row_warps * cut.k_warps,
        maxnreg=_MOST_REGISTERS,
    )


@cache
def _device_facts(device: torch.device) -> tuple[tuple[int, int], int]:
    """Compute capability and multiprocessors."""
    if device.type != "cuda":  # a caller runs or compiles the kernel otherwise
        return _LEAST_CAPABILITY, 132
    properties = torch.cuda.get_device_properties(device)
    return (properties.major, properties.minor), properties.multi_processor_count


_counters_of: dict[tuple[torch.device, int | None], torch.Tensor] = {}


def _counters(device: torch.device) -> torch.Tensor:
    """Zeros that a call finds and leaves: a stream's own, for calls that run at the same time must not share them.

    Calls that are captured share some of their own: graphs with products in parts must not run beside each other. The
    memory of a capture is the graph's, so these are made before, by the first call that is none.
    """
    is_cuda = device.type == "cuda"
    is_captured = is_cuda and torch.cuda.is_current_stream_capturing()
    key = device, None if is_captured else torch.cuda.current_stream(device).cuda_stream if is_cuda else 0
    found = _counters_of.get(key)
    if found is None:
        found = torch.zeros(_NUM_COUNTERS, dtype=torch.int32, device=device)
        if not is_captured:
            _counters_of[key] = found
            _counters_of.setdefault((device, None), torch.zeros_like(found))
    return found


@triton.jit
def _load(ptr):  # type: ignore[no-untyped-def]
    """Codes of 32 rows and 64 columns: two tiles of 4 words."""
    WORDS: tl.constexpr = (tl.int32, tl.int32, tl.int32, tl.int32)
    ASM: tl.constexpr = ptx.load_asm()
    low = tl.inline_asm_elementwise(ASM, "=r,=r,=r,=r,l", [ptr], dtype=WORDS, is_pure=False, pack=1)
    high = tl.inline_asm_elementwise(ASM, "=r,=r,=r,=r,l", [ptr + 512], dtype=WORDS, is_pure=False, pack=1)
    return low, high


@triton.jit
def _load_scales(ptr):  # type: ignore[no-untyped-def]
    """Of each of the two tiles a word, as a tuple of its own."""
    ASM: tl.constexpr = ptx.load_scales_asm()
    low, high = tl.inline_asm_elementwise(ASM, "=r,=r,l", [ptr], dtype=(tl.int32, tl.int32), is_pure=False, pack=1)
    return (low,), (high,)


@triton.jit
def _with_token(token, ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.inline_asm_elementwise(ASM, "=r,r", [token], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _read(address):  # type: ignore[no-untyped-def]
    WORDS: tl.constexpr = (tl.int32, tl.int32, tl.int32, tl.int32)
    ASM: tl.constexpr = ptx.read_asm()
    return tl.inline_asm_elementwise(ASM, "=r,=r,=r,=r,r", [address], dtype=WORDS, is_pure=False, pack=1)


@triton.jit
def _read_x(address, OCTETS: tl.constexpr):  # type: ignore[no-untyped-def]
    """x of 64 columns: 8 words for each octet of tokens."""
    words = _read(address) + _read(address + 512)
    if OCTETS == 2:
        words = words + _read(address + 1024) + _read(address + 1536)
    return words


@triton.jit
def _stage(address, ptr, token, tokens, columns, OCTETS: tl.constexpr, THREADS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sets out to copy a turn of x, 16 bytes of a thread's token at a time, into the order of fragments.

    That is [step][octet][half of a step][8 tokens][4 times 16 bytes]; a thread's first 16 bytes are at ``ptr``. Tokens
    that are not there are left out: what shared memory happens to hold for them reaches only their sums, which nobody
    stores.
    """
    ASM: tl.constexpr = ptx.copy_asm()
    for ahead in tl.static_range(0, _DEPTH * OCTETS, THREADS // 64):  # octets
        source = ptr + (ahead // OCTETS * 128 + ahead % OCTETS * 16 * columns)
        is_there = (token + ahead % OCTETS * 8 < tokens).to(tl.int32)
        operands = [address + ahead * 1024, source, is_there]
        tl.inline_asm_elementwise(ASM, "=r,r,l,r", operands, dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _accumulate(operands, sums, OCTETS: tl.constexpr, ASM: tl.constexpr, CONSTRAINTS: tl.constexpr):  # type: ignore[no-untyped-def]
    FOUR: tl.constexpr = (tl.float32, tl.float32, tl.float32, tl.float32)
    KINDS: tl.constexpr = FOUR if OCTETS == 1 else FOUR + FOUR
    return tl.inline_asm_elementwise(ASM, CONSTRAINTS, operands + sums, dtype=KINDS, is_pure=True, pack=1)


@triton.jit
def _turn(  # type: ignore[no-untyped-def]
    codes,
    scales,
    sums,
    none,
    token,
    codes_ptr,
    scales_ptr,
    address,
    IS_LAST: tl.constexpr,
    IS_BFLOAT: tl.constexpr,
    OCTETS: tl.constexpr,
    STEPS_PER_GROUP: tl.constexpr,
):
    """A turn whose codes and scales are in registers; unless it IS_LAST, loads those of the next one in their place."""
    MULTIPLY: tl.constexpr = ptx.multiply_asm(IS_BFLOAT, OCTETS)
    MULTIPLY_IO: tl.constexpr = ptx.multiply_constraints(OCTETS)
    SCALE: tl.constexpr = ptx.scale_asm(IS_BFLOAT, OCTETS)
    SCALE_IO: tl.constexpr = ptx.scale_constraints(OCTETS)
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
        if not IS_LAST:
            next_codes += (_load(codes_ptr + (_DEPTH + step) * 2048),)  # type: ignore[assignment]
        if step % STEPS_PER_GROUP == STEPS_PER_GROUP - 1:
            scale = scales[step // STEPS_PER_GROUP]
            low = _accumulate(scale[0] + low, sums[0], OCTETS, SCALE, SCALE_IO)
            high = _accumulate(scale[1] + high, sums[1], OCTETS, SCALE, SCALE_IO)
            sums = (low, high)
            if not IS_LAST:
                ahead = (_DEPTH + step) // STEPS_PER_GROUP
                next_scales += (_load_scales(scales_ptr + ahead * 128),)  # type: ignore[assignment]
        if not IS_LAST:
            token = _with_token(token, ptx.fence_asm())
    return next_codes, next_scales, sums


@triton.jit
def _stacked(sums, OCTETS: tl.constexpr):  # type: ignore[no-untyped-def]
    """[threads, 8 or 16]: a thread's sums of two tiles, in their order."""
    flat = sums[0] + sums[1]
    for half in tl.static_range(4 - OCTETS, 4):
        joined = ()
        for i in tl.static_range(32 >> half):
            joined += (tl.join(flat[i], flat[i + (32 >> half)]),)  # type: ignore[assignment]
        flat = joined
    one = tl.join(tl.join(flat[0], flat[2]), tl.join(flat[1], flat[3]))
    return tl.reshape(one, (one.numel // (8 * OCTETS), 8 * OCTETS))


@triton.jit
def _finish(  # type: ignore[no-untyped-def]
    sums,
    bias_ptr,
    out_ptr,
    sums_ptr,
    counters_ptr,
    tile,
    part,
    first_row,
    first_token,
    tokens,
    rows,
    PARTS: tl.constexpr,
    OCTETS: tl.constexpr,
    ROW_WARPS: tl.constexpr,
    K_WARPS: tl.constexpr,
):
    """Writes the program's sums: those of its warps added, then those of all parts, by the program that comes last."""
    total = _stacked(sums, OCTETS)
    if K_WARPS > 1:
        total = tl.sum(tl.reshape(total, (K_WARPS, ROW_WARPS * 32, 8 * OCTETS)), 0)
    thread = tl.arange(0, ROW_WARPS * 32)[:, None]
    index = tl.arange(0, 8 * OCTETS)[None, :]
    row = first_row + thread // 32 * 32 + index // (4 * OCTETS) * 16 + thread % 32 // 4 + index % 4 // 2 * 8
    token = first_token + index // 4 % OCTETS * 8 + thread % 4 * 2 + index % 2
    place = token * rows + row
    mask = token < tokens
    is_last = True
    if PARTS > 1:
        tl.store(sums_ptr + part * tokens * rows + place, total, mask=mask)
        tl.debug_barrier()  # all threads' sums are written before one of them counts
        is_last = tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel", scope="gpu") == PARTS - 1
        if is_last:
            total = tl.zeros((ROW_WARPS * 32, 8 * OCTETS), tl.float32)
            for other in range(PARTS):
                ptrs = sums_ptr + other * tokens * rows + place
                total += tl.load(ptrs, mask=mask, other=0, cache_modifier=".cg")
            tl.store(counters_ptr + tile, 0)
    if is_last:
        if bias_ptr is not None:
            total += tl.load(bias_ptr + row).to(tl.float32)
        tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens", "all_turns"])
def _fragment_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    codes_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    sums_ptr,
    counters_ptr,
    tokens,
    rows,
    columns,
    all_turns,
    IS_BFLOAT: tl.constexpr,
    PARTS: tl.constexpr,
    OCTETS: tl.constexpr,
    STEPS_PER_GROUP: tl.constexpr,
    ROW_WARPS: tl.constexpr,
    K_WARPS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Some tokens, 32 ROW_WARPS rows and a part of the turns; tokens of the same rows run beside each other."""
    THREADS: tl.constexpr = ROW_WARPS * 32  # that share x
    X_BYTES: tl.constexpr = OCTETS * _DEPTH * 1024  # of a turn
    token_tiles = tl.cdiv(tokens, 8 * OCTETS)
    num_tiles = tl.num_programs(0) // PARTS
    part, tile = tl.program_id(0) // num_tiles, tl.program_id(0) % num_tiles
    first_token, first_row = tile % token_tiles * (8 * OCTETS), tile // token_tiles * (32 * ROW_WARPS)
    turns_before = part * all_turns // PARTS
    turns = (part + 1) * all_turns // PARTS - turns_before
    thread = tl.arange(0, THREADS * K_WARPS)
    lane, k_warp = thread % 32, thread // THREADS
    row_tile = first_row // 16 + thread // 32 % ROW_WARPS * 2
    block = (row_tile // 4).to(tl.int64)
    step = (turns_before * K_WARPS + k_warp * turns) * _DEPTH  # of 64 columns
    codes_offset = (block * (columns // 64) + step) * 2048 + row_tile % 4 * 512 + lane * 16
    scales_offset = (block * (columns // 64) + step) // STEPS_PER_GROUP * 128 + lane // 4 * 16 + row_tile % 4 * 4
    codes_ptrs = codes_ptr.to(tl.pointer_type(tl.int8)) + codes_offset
    scales_ptrs = scales_ptr.to(tl.pointer_type(tl.int8)) + scales_offset
    codes = ()
    scales = ()
    for ahead in tl.static_range(_DEPTH):
        codes += (_load(codes_ptrs + ahead * 2048),)  # type: ignore[assignment]
        if ahead % STEPS_PER_GROUP == 0:
            scales += (_load_scales(scales_ptrs + ahead // STEPS_PER_GROUP * 128),)  # type: ignore[assignment]
    place = thread % THREADS
    token = first_token + place // 64 % OCTETS * 8 + place % 32 // 4
    column = step * 64 + place // (64 * OCTETS) * 64 + place // 32 % 2 * 32 + place % 4 * 8
    x_ptrs = x_ptr.to(tl.pointer_type(tl.int8)) + (token * columns + column) * 2
    if IS_DEPENDENT:  # nothing that another kernel may read or write is touched before
        gdc_wait()
        gdc_launch_dependents()
    base = _with_token(thread, ptx.staging_asm(_STAGES * K_WARPS * X_BYTES)) + k_warp * X_BYTES
    copy_to, read_from = base + place * 16, base + lane * 16
    _stage(copy_to, x_ptrs, token, tokens, columns, OCTETS, THREADS)
    zero = tl.zeros((THREADS * K_WARPS,), tl.float32)
    none = (zero, zero, zero, zero)
    if OCTETS == 2:
        none += none  # type: ignore[assignment]
    sums = (none, none)
    now, other = 0, K_WARPS * X_BYTES  # where x of this turn is, and that of the next one comes
    for _ in range(turns - 1):
        k_warp = _with_token(k_warp, ptx.meet_asm(ROW_WARPS, K_WARPS))
        x_ptrs += _DEPTH * 128
        _stage(copy_to + other, x_ptrs, token, tokens, columns, OCTETS, THREADS)
        codes, scales, sums = _turn(
            codes, scales, sums, none, thread, codes_ptrs, scales_ptrs, read_from + now, False, IS_BFLOAT, OCTETS,
            STEPS_PER_GROUP,
        )  # fmt: skip
        codes_ptrs += _DEPTH * 2048
        scales_ptrs += _DEPTH // STEPS_PER_GROUP * 128
        now, other = other, now
    k_warp = _with_token(k_warp, ptx.meet_asm(ROW_WARPS, K_WARPS))
    _, _, sums = _turn(
        codes, scales, sums, none, thread, codes_ptrs, scales_ptrs, read_from + now, True, IS_BFLOAT, OCTETS,
        STEPS_PER_GROUP,
    )  # fmt: skip
    _finish(
        sums, bias_ptr, out_ptr, sums_ptr, counters_ptr, tile, part, first_row, first_token, tokens, rows, PARTS,
        OCTETS, ROW_WARPS, K_WARPS,
    )  # fmt: skip
