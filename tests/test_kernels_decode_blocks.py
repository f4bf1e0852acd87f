"""Blocks of ggml's types decoded by the kernel: to the bit what the torch twin decodes, whatever the bytes."""

import numpy as np
import pytest
import torch

from zinfer.kernels.decode_blocks import KINDS, decode_blocks
from zinfer.weights.formats.gguf import decode
from zinfer.weights.gguf_header import GGML_TYPES

TYPES = {type.name: (number, type) for number, type in GGML_TYPES.items()}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # bytes are any: scales overflow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_equals_its_twin(kernel_device: str, kind: str, dtype: torch.dtype) -> None:
    number, type = TYPES[kind]
    assert KINDS[kind] == (number, type.values, type.nbytes)
    for seed, rows in enumerate((1, 3, 67)):
        octets = np.random.default_rng(seed).integers(0, 256, (rows, 3 * type.nbytes), dtype=np.uint8)
        blocks = torch.from_numpy(octets)
        out = torch.full((rows, 3 * type.values), 77, dtype=dtype, device=kernel_device)
        found = decode_blocks(kind, blocks.to(kernel_device), out).cpu().float()
        wanted = decode(type, blocks).to(dtype).float()
        # Triton's interpreter cuts places of bfloat16 off instead of rounding, and its smallest values to 0.
        is_cut = kernel_device == "cpu" and dtype == torch.bfloat16
        torch.testing.assert_close(found, wanted, rtol=2**-7 if is_cut else 0, atol=1e-37, equal_nan=True)
