"""How kernels are launched: in what tiles, and before the kernel ahead has ended (programmatic dependent launches, from
compute capability 9.0 on)."""

from functools import cache
from typing import Final

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_DEPENDENT_CAPABILITY: Final = (9, 0)
_FEW_ELEMENTS: Final = 1 << 19


@cache
def is_dependent(device: torch.device) -> bool:
    """Whether kernels on the device are launched so: each then says where it needs what those before have written."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _DEPENDENT_CAPABILITY


def tile_for(count: int) -> tuple[int, int]:
    """Elements and warps of a program that passes over ``count`` elements: fewer where there are few programs."""
    return (2048, 4) if count > _FEW_ELEMENTS else (512, 2)


@triton.jit
def wait_for_others(IS_DEPENDENT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Before it a kernel must touch nothing that another may read or write; the next one may begin from here on.

    Every program of every kernel so launched has to come by here: what a kernel waits for is the one before it alone,
    which must not end while those before that still run.
    """
    if IS_DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
