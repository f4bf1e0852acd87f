"""How kernels are launched: compiled or interpreted, on which device, in what tiles, and when the next may begin."""

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
"""For kernels to ask."""

_DEPENDENT_CAPABILITY: Final = (9, 0)
_FEW_ELEMENTS: Final = 1 << 19


def on_device(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Make the tensor's device the current one, on which Triton launches."""
    return torch.cuda.device(tensor.device) if tensor.device.type == "cuda" else nullcontext()


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """x as [rows, width] with the elements of a row side by side."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def tile_for(count: int) -> tuple[int, int]:
    """Elements and warps of a program that passes over ``count`` elements: fewer where there are few programs."""
    return (2048, 4) if count > _FEW_ELEMENTS else (512, 2)


@cache
def is_dependent(device: torch.device) -> bool:
    """Whether a kernel may begin while the one before it still runs (programmatic dependent launch)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _DEPENDENT_CAPABILITY


def dependent_options(device: torch.device) -> dict[str, bool]:
    """Options of a launch whose kernel takes IS_DEPENDENT."""
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


@triton.jit
def dot(left, right, sums):  # type: ignore[no-untyped-def]
    """Adds a product of tiles to sums; the interpreter has no arithmetic for bfloat16."""
    if not COMPILED:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, sums, input_precision="ieee")


@triton.jit
def launch_dependents(IS_DEPENDENT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Call first: lets the next kernel start once every program reaches this point (PDL).

    That one then loads what no kernel writes, such as a product's matrix, and waits.
    """
    if IS_DEPENDENT:
        gdc_launch_dependents()


@triton.jit
def grid_dependency_wait(IS_DEPENDENT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Wait for the kernels before. Until then a kernel must touch nothing that they may write: those of the unbroken
    run of such launches that it is in, and the one right before that run. Other launches and copies end a run.

    Every program of every kernel so launched must call it: a kernel waits for the one before it alone, which must not
    end while those before that still run.
    """
    if IS_DEPENDENT:
        gdc_wait()
