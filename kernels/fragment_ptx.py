"""PTX of the product in fragment order, for per-thread operations that Triton's language cannot express.

Every function returns the text of one `inline_asm_elementwise`, whose tensors have one element per thread; kernels call
them at compile time. Instructions need compute capability 8.0.
"""

import triton
import triton.language as tl

FENCE = tl.constexpr("bar.warp.sync 0xffffffff; mov.b32 $0, $1;")
"""The assembler moves no load past it; otherwise it would load codes as late as registers allow."""
LOAD = tl.constexpr(
    "{ .reg .pred p; setp.ne.b32 p, $5, 0; @p ld.global.L1::no_allocate.v4.b32 {$0, $1, $2, $3}, [$4]; }"
)
"""Load sixteen bytes of codes at $4. Not marked .nc: the assembler moves .nc loads past a fence."""
LOAD_SCALES = tl.constexpr("{ .reg .pred p; setp.ne.b32 p, $3, 0; @p ld.global.v2.b32 {$0, $1}, [$2]; }")
"""Load two words of two scales at $2."""
READ = tl.constexpr("ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];")
"""Load sixteen bytes of shared memory at $4."""
WRITE = tl.constexpr("st.shared.v4.b32 [$1], {$2, $3, $4, $5}; mov.b32 $0, $1;")
"""Store sixteen bytes to shared memory at $1."""


@triton.constexpr_function
def staging_asm(nbytes: int) -> str:
    """$0: the address of the program's shared memory. Use it once in a kernel, since it declares the memory."""
    return f".shared .align 16 .b8 staged_x[{nbytes}]; mov.u32 $0, staged_x;"


@triton.constexpr_function
def copy_asm() -> str:
    """Copy sixteen bytes at $2 to shared memory at $1 if $3 is not 0; asynchronous."""
    return "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p cp.async.cg.shared.global [$1], [$2], 16; mov.b32 $0, $1; }"


@triton.constexpr_function
def meet_asm(row_warps: int, k_warps: int) -> str:
    """Wait until the copies of all warps of one range of columns ($1: which) are visible to each of them.

    Each range has its own barrier. Triton's own barriers are number 0.
    """
    bars = (f"setp.eq.u32 p, $1, {k_warp}; @p bar.sync {k_warp + 1}, {row_warps * 32}; " for k_warp in range(k_warps))
    return "{ .reg .pred p; cp.async.wait_all; " + "".join(bars) + "mov.b32 $0, $1; }"


@triton.constexpr_function
def meet_all_asm(threads: int, k_warps: int) -> str:
    """Wait until all ranges of columns, of ``threads`` threads each, arrive."""
    return f"bar.sync {k_warps + 1}, {threads * k_warps}; mov.b32 $0, $1;"


@triton.constexpr_function
def multiply_asm(is_bfloat: bool, octets: int) -> str:
    """$0 and on: sums, in and out, 4 for each octet of tokens; then 4 words of codes; then 8 words of x for each octet.

    A word becomes the four registers of a fragment, pairs of whole numbers: codes are or-ed into the mantissa of a
    number whose last place is worth 1 (16 for codes 4 bits higher); then that number and 8 are subtracted.
    """
    count = 4 * octets
    kind, magic = ("bf16", "0x43004300") if is_bfloat else ("f16", "0x64006400")
    lines = [".reg .b32 a, b, c, d, q, u, m, n;"]
    if is_bfloat:
        lines.append("mov.b32 m, 0x3f803f80; mov.b32 n, 0xc308c308;")  # 1 and -136
    else:
        lines.append("mov.b32 u, 0xe408e408; mov.b32 m, 0x2c002c00; mov.b32 n, 0xd480d480;")  # -1032, 1 / 16 and -72
    for word in range(4):
        lines += _widen_to_bf16(f"${count + word}", magic) if is_bfloat else _widen_to_fp16(f"${count + word}", magic)
        for octet in range(octets):
            sums = ", ".join(f"${4 * octet + i}" for i in range(4))
            x = count + 4 + 8 * octet + 2 * word
            lines.append(
                f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{{sums}}}, {{a, b, c, d}}, "
                f"{{${x}, ${x + 1}}}, {{{sums}}};"
            )
    return "{ " + " ".join(lines) + " }"


@triton.constexpr_function
def _widen_to_fp16(word: str, magic: str) -> list[str]:
    return [
        f"shr.u32 q, {word}, 8;",
        f"lop3.b32 a, {word}, 0x000f000f, {magic}, 0xea;",
        f"lop3.b32 b, {word}, 0x00f000f0, {magic}, 0xea;",
        f"lop3.b32 c, q, 0x000f000f, {magic}, 0xea;",
        f"lop3.b32 d, q, 0x00f000f0, {magic}, 0xea;",
        "add.rn.f16x2 a, a, u; add.rn.f16x2 c, c, u; fma.rn.f16x2 b, b, m, n; fma.rn.f16x2 d, d, m, n;",
    ]


@triton.constexpr_function
def _widen_to_bf16(word: str, magic: str) -> list[str]:
    lines = [f"lop3.b32 a, {word}, 0x000f000f, {magic}, 0xea;"]
    for shift, name in ((4, "b"), (8, "c"), (12, "d")):
        lines.append(f"shr.u32 q, {word}, {shift}; lop3.b32 {name}, q, 0x000f000f, {magic}, 0xea;")
    return [*lines, *(f"fma.rn.bf16x2 {name}, {name}, m, n;" for name in "abcd")]


@triton.constexpr_function
def scale_asm(is_bfloat: bool, octets: int) -> str:
    """$0 and on: sums, in and out, 4 for each octet of tokens; a word of two rows' scales; the numbers to scale."""
    count = 4 * octets
    if is_bfloat:
        widen = f"shl.b32 p, ${count}, 16; mov.b32 u, p; and.b32 p, ${count}, 0xffff0000; mov.b32 v, p;"
    else:
        widen = f"mov.b32 {{l, h}}, ${count}; cvt.f32.f16 u, l; cvt.f32.f16 v, h;"
    sums = (f"fma.rn.f32 ${i}, ${count + 1 + i}, {'uv'[i % 4 // 2]}, ${i};" for i in range(count))
    return "{ .reg .b16 l, h; .reg .f32 u, v; .reg .b32 p; " + " ".join((widen, *sums)) + " }"


@triton.constexpr_function
def constraints(octets: int, words: int, floats: int) -> str:
    """Return the constraints for these operands, with sums as both input and output."""
    count = 4 * octets
    return ",".join(["=f"] * count + ["r"] * words + ["f"] * floats + [str(i) for i in range(count)])
