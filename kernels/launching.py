"""Launches kernels: compiled or interpreted, on the tensor's device, with dependent launches (PDL)."""

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, Final

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

INTERPRETED: Final = bool(triton.knobs.runtime.interpret)
"""Whether Triton's interpreter runs the kernels; fixed when they are decorated."""
COMPILED = tl.constexpr(not INTERPRETED)
"""`INTERPRETED` for use inside kernels."""

_DEPENDENT_CAPABILITY: Final = (9, 0)
_FEW_ELEMENTS: Final = 1 << 19


def on_device(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Return a context in which the tensor's device is current, since Triton launches there."""
    return torch.cuda.device(tensor.device) if tensor.device.type == "cuda" else nullcontext()


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """Return x as [rows, width] with contiguous rows."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def tile_for(count: int) -> tuple[int, int]:
    """Return elements and warps per program for ``count`` elements: fewer if there would be few programs."""
    return (2048, 4) if count > _FEW_ELEMENTS else (512, 2)


@cache
def is_dependent(device: torch.device) -> bool:
    """Return whether a kernel may start while the previous one still runs (programmatic dependent launch)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _DEPENDENT_CAPABILITY


def dependent_options(device: torch.device) -> dict[str, bool]:
    """Return the launch options of a kernel with the argument IS_DEPENDENT."""
    dependent = is_dependent(device)
    return {"IS_DEPENDENT": dependent, "launch_pdl": dependent}


def launch_flat(kernel: Any, out: torch.Tensor, *operands: torch.Tensor, **constants: Any) -> None:
    """Launch a kernel that takes operands, out, its number of elements and BLOCK; all contiguous."""
    if out.numel():
        block, warps = tile_for(out.numel())
        with on_device(out):
            kernel[(triton.cdiv(out.numel(), block),)](
                *operands,
                out,
                out.numel(),
                BLOCK=block,
                **constants,
                **dependent_options(out.device),
                num_warps=warps,
            )


def device_function(function: Any) -> Any:
    """Decorate a function that kernels call, as `triton.jit`, and hash it at once; those that it calls come before it.

    Triton puts the constants that a function uses into the hash of a kernel only if the function was hashed before.
    So the hash would depend on which kernel runs first, and a process would compile again what another one has.
    """
    found = triton.jit(function)
    if not INTERPRETED:
        hash(found)
    return found


@device_function
def dot(left, right, sums):  # type: ignore[no-untyped-def]
    """Add a product of tiles to sums; in float32 under the interpreter, which has no bfloat16 arithmetic."""
    if not COMPILED:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, sums, input_precision="ieee")


@device_function
def launch_dependents(IS_DEPENDENT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Call first: lets the next kernel start once every program reaches this point (PDL).

    The next kernel then loads data that no kernel writes, such as a product's matrix, and waits.
    """
    if IS_DEPENDENT:
        gdc_launch_dependents()


@device_function
def grid_dependency_wait(IS_DEPENDENT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Wait for the previous kernels. Before this, a kernel must touch nothing that they may write.

    They are the kernels of the current unbroken run of dependent launches, and the one right before that run. Other
    launches and copies end a run. Every program of every dependent kernel must call this: a kernel only waits for the
    one before it, which must not end while earlier ones still run.
    """
    if IS_DEPENDENT:
        gdc_wait()
