"""How all kernels are launched: compiled or interpreted, and on which device."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
import triton

INTERPRETED: Final = bool(triton.knobs.runtime.interpret)
"""Whether Triton's interpreter runs the kernels; fixed when they are decorated."""


def on_device(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current device, whatever the tensors' own."""
    return torch.cuda.device(tensor.device) if tensor.device.type == "cuda" else nullcontext()
