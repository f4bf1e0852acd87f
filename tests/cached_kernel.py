"""Compiles a kernel into Triton's cache as a launch does, for a GPU that this machine need not have. Without the
interpreter.

As a script: compiles so many variants, and prints a line after each.
"""

import sys

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGET = GPUTarget("cuda", 90, 32)


@triton.jit
def add_kernel(values_ptr, number: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add a number to 128 values."""
    places = values_ptr + tl.arange(0, 128)
    tl.store(places, tl.load(places) + number)


def compiled(number: int) -> bytes:
    """Return the machine code of a variant, from the cache if it is there."""
    source = ASTSource(add_kernel, {"values_ptr": "*fp32", "number": "constexpr"}, {"number": number})
    return bytes(triton.compile(source, target=TARGET).asm["cubin"])


if __name__ == "__main__":
    for number in range(int(sys.argv[1])):
        compiled(number)
        print(number, flush=True)
