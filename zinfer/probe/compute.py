"""A device's own speed: copies within its memory, and dense matrix products."""

import torch

from zinfer.probe.clock import median_seconds


def matmul_dtype(device: torch.device) -> torch.dtype:
    """What a model computes in there: fp32 on a CPU, bf16 on a GPU that has it, else fp16."""
    if device.type != "cuda":
        return torch.float32
    with torch.cuda.device(device):
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16


def measure_device_copy(device: torch.device, nbytes: int, *, repeats: int) -> float:
    """Bytes read and written a second, together."""
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * nbytes / median_seconds(lambda: target.copy_(source), [device], repeats=repeats)


def measure_matmul(device: torch.device, width: int, dtype: torch.dtype, *, num_matmuls: int, repeats: int) -> float:
    """FLOP/s of ``num_matmuls`` products of random [width, width] matrices in a row (2 width^3 each).

    Random, because a GPU multiplies zeros faster than it can keep up with real numbers.
    """
    matrix = torch.randn(width, width, device=device, dtype=dtype)
    product = torch.empty_like(matrix)

    def multiply() -> None:
        for _ in range(num_matmuls):
            torch.mm(matrix, matrix, out=product)

    return 2 * width**3 * num_matmuls / median_seconds(multiply, [device], repeats=repeats)
