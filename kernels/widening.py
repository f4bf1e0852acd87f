"""Converts codes to floating-point numbers in registers, for every kernel that reads codes.

A GPU converts 16 integers per clock but multiplies 128: so codes are or-ed into the mantissa of a number whose last
place is worth 1 (1024 in float16, 128 in bfloat16), which is then subtracted (Kim et al. 2022, "Who says elephants
can't run").
This is exact: the results are whole numbers. Triton's interpreter has no PTX and no bfloat16 arithmetic: there the
results are float32.
"""

import triton.language as tl

from zinfer.kernels.launching import COMPILED, device_function


def bytes_asm(bfloat: bool, signed: bool) -> str:
    """PTX: four codes ($2) to four numbers ($0, $1), unsigned codes less 128.

    bfloat16 has 7 bits of mantissa, one too few for 128 + code. But a signed code with sign bit s and other bits r has
    the value r - 128 s, and or-ing s into the last bit of 128's exponent makes 128 + 128 s.
    """
    return spread_asm("$2", "$0", "$1", bfloat, signed)


def words_asm(bfloat: bool, is_float: bool) -> str:
    """PTX: two words of four codes ($4, $5) to the pair of their first numbers ($0), of their second ($1), and so on.

    Codes are signed, or the bits of e4m3 numbers.
    """
    spread = floats_asm if is_float else spread_asm
    first = "{ .reg .b32 x, y; prmt.b32 x, $4, $5, 0x5140; prmt.b32 y, $4, $5, 0x7362; "
    return first + spread("x", "$0", "$1", bfloat) + spread("y", "$2", "$3", bfloat) + " }"


def scaled_nibbles_asm() -> str:
    """PTX: two words of eight e2m1 numbers ($8, $9) to pairs in bfloat16 of their first ones ($0) to their last ($7).

    Sign, exponent and mantissa are placed in bfloat16's; the factor 2**126 that remains is left to the scales ($10).
    """
    found = "{ .reg .b32 y, z, s, e, n; prmt.b32 y, $8, $9, 0x5410; prmt.b32 z, $8, $9, 0x7632; mov.b32 n, 0x80008000; "
    shifts = (("shl", 6), ("shl", 12)), (("shl", 2), ("shl", 8)), (("shr", 2), ("shl", 4)), (("shr", 6), ("shl", 0))
    for number in range(8):
        halves, ((way, places), (_, sign)) = "yz"[number // 4], shifts[number % 4]
        found += f"{way}.b32 e, {halves}, {places}; shl.b32 s, {halves}, {sign}; and.b32 s, s, n; "
        found += f"lop3.b32 e, e, 0x01c001c0, s, 0xea; fma.rn.bf16x2 ${number}, e, $10, n; "
    return found + "}"


def scaled_words_asm() -> str:
    """PTX: as `words_asm` of e4m3 numbers to bfloat16, with scales ($6) that have the factor 2**120."""
    first = "{ .reg .b32 x, y; prmt.b32 x, $4, $5, 0x5140; prmt.b32 y, $4, $5, 0x7362; "
    pairs = floats_asm("x", "$0", "$1", True, "$6") + floats_asm("y", "$2", "$3", True, "$6")
    return first + pairs + " }"


def floats_asm(codes: str, low: str, high: str, bfloat: bool, scales: str = "") -> str:
    """PTX: four e4m3 numbers to two pairs.

    Exponent and mantissa are placed at the low bits of the other's exponent and the high bits of its mantissa; the
    remaining factor is a power of two. A NaN becomes 480.
    """
    kind, shift, mask, factor = (
        ("bf16", 4, "0x07f007f0", "0x7b807b80") if bfloat else ("f16", 1, "0x3f803f80", "0x5c005c00")
    )
    first = f"{{ .reg .b32 a, b, c, d, m, n; prmt.b32 a, {codes}, 0, 0x1404; prmt.b32 b, {codes}, 0, 0x3424; "
    first += f"shr.b32 c, a, {shift}; shr.b32 d, b, {shift}; and.b32 c, c, {mask}; and.b32 d, d, {mask}; "
    first += "lop3.b32 c, a, 0x80008000, c, 0xea; lop3.b32 d, b, 0x80008000, d, 0xea; "
    first += f"mov.b32 m, {scales or factor}; mov.b32 n, 0x80008000; "  # 2**120 or 2**8, -0
    return first + f"fma.rn.{kind}x2 {low}, c, m, n; fma.rn.{kind}x2 {high}, d, m, n; }} "


def spread_asm(codes: str, low: str, high: str, bfloat: bool, signed: bool = True) -> str:
    first = "{ .reg .b32 c, a, b, d; "
    first += f"xor.b32 c, {codes}, {'0x80808080' if signed != bfloat else '0'}; "
    if not bfloat:
        spread = "prmt.b32 a, c, 0x64646464, 0x4140; prmt.b32 b, c, 0x64646464, 0x4342; mov.b32 d, 0xe480e480; "
        return first + spread + f"add.rn.f16x2 {low}, a, d; add.rn.f16x2 {high}, b, d; }} "
    spread = ".reg .b32 p, q, m; prmt.b32 a, c, 0x43434343, 0x4140; prmt.b32 b, c, 0x43434343, 0x4342; "
    spread += "and.b32 p, a, 0xff80ff80; and.b32 q, b, 0xff80ff80; and.b32 a, a, 0xff7fff7f; and.b32 b, b, 0xff7fff7f; "
    spread += "mov.b32 m, 0xbf80bf80; "
    return first + spread + f"fma.rn.bf16x2 {low}, p, m, a; fma.rn.bf16x2 {high}, q, m, b; }} "


def nibbles_asm(bfloat: bool) -> str:
    """PTX: eight codes ($4) less 8: from the low halves of the bytes ($0, $1) and from the high halves ($2, $3)."""
    first = "{ .reg .b32 a, b, c, d, m, n; prmt.b32 a, $4, 0, 0x4140; prmt.b32 b, $4, 0, 0x4342; "
    magic = "0x43004300" if bfloat else "0x64006400"
    low = f"lop3.b32 $0, a, 0x000f000f, {magic}, 0xea; lop3.b32 $1, b, 0x000f000f, {magic}, 0xea; "
    if bfloat:
        high = "shr.b32 c, a, 4; shr.b32 d, b, 4; "
        high += f"lop3.b32 $2, c, 0x000f000f, {magic}, 0xea; lop3.b32 $3, d, 0x000f000f, {magic}, 0xea; "
        last = "mov.b32 m, 0x3f803f80; mov.b32 n, 0xc308c308; "
        return first + low + high + last + " ".join(f"fma.rn.bf16x2 ${i}, ${i}, m, n;" for i in range(4)) + " }"
    high = f"lop3.b32 $2, a, 0x00f000f0, {magic}, 0xea; lop3.b32 $3, b, 0x00f000f0, {magic}, 0xea; "
    low += "mov.b32 c, 0xe408e408; add.rn.f16x2 $0, $0, c; add.rn.f16x2 $1, $1, c; "
    high += "mov.b32 m, 0x2c002c00; mov.b32 n, 0xd480d480; "  # (1024 + 16 code) / 16 - 72
    return first + low + high + "fma.rn.f16x2 $2, $2, m, n; fma.rn.f16x2 $3, $3, m, n; }"


_SIGNED_TO_FP16 = tl.constexpr(bytes_asm(bfloat=False, signed=True))
_SIGNED_TO_BF16 = tl.constexpr(bytes_asm(bfloat=True, signed=True))
_UNSIGNED_TO_FP16 = tl.constexpr(bytes_asm(bfloat=False, signed=False))
_UNSIGNED_TO_BF16 = tl.constexpr(bytes_asm(bfloat=True, signed=False))
_FLOATS_TO_FP16 = tl.constexpr(floats_asm("$2", "$0", "$1", bfloat=False))
_FLOATS_TO_BF16 = tl.constexpr(floats_asm("$2", "$0", "$1", bfloat=True))
_WORDS_TO_FP16 = tl.constexpr(words_asm(bfloat=False, is_float=False))
_WORDS_TO_BF16 = tl.constexpr(words_asm(bfloat=True, is_float=False))
_FLOAT_WORDS_TO_FP16 = tl.constexpr(words_asm(bfloat=False, is_float=True))
_FLOAT_WORDS_TO_BF16 = tl.constexpr(words_asm(bfloat=True, is_float=True))
_NIBBLES_TO_FP16 = tl.constexpr(nibbles_asm(bfloat=False))
_NIBBLES_TO_BF16 = tl.constexpr(nibbles_asm(bfloat=True))
_SCALED_NIBBLES = tl.constexpr(scaled_nibbles_asm())
_SCALED_WORDS = tl.constexpr(scaled_words_asm())
_FLOAT8_FACTOR = tl.constexpr(2.0**8)
_FLOAT4_FACTOR = tl.constexpr(2.0**14)


@device_function
def widen_bytes(codes, IS_BFLOAT: tl.constexpr, IS_FLOAT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Convert 8-bit codes to float16 or bfloat16: int8, uint8 less 128, or the bits of e4m3 numbers (IS_FLOAT)."""
    signed: tl.constexpr = codes.dtype == tl.int8
    if IS_FLOAT and not COMPILED:
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    elif not COMPILED:
        return codes.to(tl.float32) if signed else codes.to(tl.float32) - 128
    elif IS_FLOAT and IS_BFLOAT:
        return tl.inline_asm_elementwise(_FLOATS_TO_BF16, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4)
    elif IS_FLOAT:
        return tl.inline_asm_elementwise(_FLOATS_TO_FP16, "=r,=r,r", [codes], dtype=tl.float16, is_pure=True, pack=4)
    elif IS_BFLOAT:
        to_bf16: tl.constexpr = _SIGNED_TO_BF16 if signed else _UNSIGNED_TO_BF16
        return tl.inline_asm_elementwise(to_bf16, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4)
    else:
        to_fp16: tl.constexpr = _SIGNED_TO_FP16 if signed else _UNSIGNED_TO_FP16
        return tl.inline_asm_elementwise(to_fp16, "=r,=r,r", [codes], dtype=tl.float16, is_pure=True, pack=4)


@device_function
def widen_words(words, IS_BFLOAT: tl.constexpr, IS_FLOAT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Convert words of four codes to float16 or bfloat16: the first code of each, the second, and so on.

    Codes are int8, or the bits of e4m3 numbers (IS_FLOAT).
    """
    if not COMPILED:
        found = ()
        for code in tl.static_range(4):
            codes = (words >> 8 * code).to(tl.uint8 if IS_FLOAT else tl.int8)
            found += (widen_bytes(codes, IS_BFLOAT, IS_FLOAT),)  # type: ignore[assignment]
        return found
    elif IS_BFLOAT:
        to_bf16: tl.constexpr = _FLOAT_WORDS_TO_BF16 if IS_FLOAT else _WORDS_TO_BF16
        bf16s: tl.constexpr = (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16)
        return tl.inline_asm_elementwise(to_bf16, "=r,=r,=r,=r,r,r", [words], dtype=bf16s, is_pure=True, pack=2)
    else:
        to_fp16: tl.constexpr = _FLOAT_WORDS_TO_FP16 if IS_FLOAT else _WORDS_TO_FP16
        fp16s: tl.constexpr = (tl.float16, tl.float16, tl.float16, tl.float16)
        return tl.inline_asm_elementwise(to_fp16, "=r,=r,=r,=r,r,r", [words], dtype=fp16s, is_pure=True, pack=2)


@device_function
def widen_nibbles(codes, IS_BFLOAT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Convert 4-bit codes less 8 to float16 or bfloat16: from the low halves of bytes, and from the high halves."""
    if not COMPILED:
        return (codes & 15).to(tl.float32) - 8, (codes >> 4).to(tl.float32) - 8
    elif IS_BFLOAT:
        return tl.inline_asm_elementwise(
            _NIBBLES_TO_BF16, "=r,=r,=r,=r,r", [codes], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    else:
        return tl.inline_asm_elementwise(
            _NIBBLES_TO_FP16, "=r,=r,=r,=r,r", [codes], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
        )


@device_function
def _halves(words):  # type: ignore[no-untyped-def]
    """Return the two float16 numbers of each word, the low half's first, as float32."""
    low, high = words.to(tl.int16), (words >> 16).to(tl.int16)
    return low.to(tl.float16, bitcast=True).to(tl.float32), high.to(tl.float16, bitcast=True).to(tl.float32)


@device_function
def float8_codes(word):  # type: ignore[no-untyped-def]
    """Convert words (int32) of four e4m3 numbers to float32, on any GPU, less a factor of 2**8; a NaN becomes 480.

    As float16 their bits have another bias of the exponent, so that numbers below the normal ones are right too.
    """
    first, third = _halves((word << 8 & -0x7FFF8000) | (word << 7 & 0x3F803F80))
    second, fourth = _halves((word & -0x7FFF8000) | (word >> 1 & 0x3F803F80))
    return first, second, third, fourth


@device_function
def float4_codes(word):  # type: ignore[no-untyped-def]
    """As `float8_codes`, words of eight e2m1 numbers, less a factor of 2**14."""
    first, fifth = _halves((word << 12 & -0x7FFF8000) | (word << 9 & 0x0E000E00))
    second, sixth = _halves((word << 8 & -0x7FFF8000) | (word << 5 & 0x0E000E00))
    third, seventh = _halves((word << 4 & -0x7FFF8000) | (word << 1 & 0x0E000E00))
    fourth, eighth = _halves((word & -0x7FFF8000) | (word >> 3 & 0x0E000E00))
    return first, second, third, fourth, fifth, sixth, seventh, eighth


@device_function
def scale_values(stored, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Convert scales to float32: floating-point numbers, or bytes of e8m0 or e4m3 (`dequantize.scale_kind`)."""
    if KIND == "e8m0":
        byte = stored.to(tl.int32)
        lowest = tl.where((byte == 0) | (byte == 255), 0x400000, 0)  # 2**-127, and NaN
        return (byte << 23 | lowest).to(tl.float32, bitcast=True)
    elif KIND == "e4m3":
        return float8_codes(stored.to(tl.int32))[0] * _FLOAT8_FACTOR
    else:
        return stored.to(tl.float32)


@device_function
def factor_of(BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the factor that `float8_codes` and `float4_codes` leave to the scales."""
    return _FLOAT4_FACTOR if BITS == 4 else _FLOAT8_FACTOR


@device_function
def _scaled(codes, scales):  # type: ignore[no-untyped-def]
    """Multiply each of several tensors with scales."""
    found = ()
    for number in tl.static_range(len(codes)):
        found += (codes[number] * scales,)  # type: ignore[assignment]
    return found


@device_function
def widen_scaled(words, scales, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Convert words (int32) of eight e2m1 or four e4m3 numbers to bfloat16, multiplied with the words' scales.

    Scales (bfloat16) have the factor 2**126 for e2m1, 2**120 for e4m3. Returns the first number of each word, the
    second, and so on.
    """
    if BITS == 4 and not COMPILED:
        return _scaled(float4_codes(words), scales.to(tl.float32) * 2.0**-112)
    elif not COMPILED:
        return _scaled(float8_codes(words), scales.to(tl.float32) * 2.0**-112)
    elif BITS == 4:
        eight: tl.constexpr = (
            tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16
        )  # fmt: skip
        return tl.inline_asm_elementwise(
            _SCALED_NIBBLES, "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r", [words, scales], dtype=eight, is_pure=True, pack=2
        )
    else:
        four: tl.constexpr = (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16)
        return tl.inline_asm_elementwise(
            _SCALED_WORDS, "=r,=r,=r,=r,r,r,r", [words, scales], dtype=four, is_pure=True, pack=2
        )
