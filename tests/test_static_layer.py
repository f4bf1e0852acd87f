"""A layer's keys and values as the kernel writes them, beside transformers' own."""

import pytest
import torch
from transformers.cache_utils import StaticLayer

from zinfer.graphs import static_layer
from zinfer.kernels.write_static import write_static_kernel


def test_a_layer_keeps_what_transformers_own_keeps(kernel_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static_layer, "write_static", write_static_kernel)
    torch.manual_seed(0)
    mine, other = static_layer.FusedStaticLayer(16), StaticLayer(16)
    for _ in range(2):
        for tokens in (9, 1, 1):
            states = torch.randn(2, tokens, 3, 24, device=kernel_device).bfloat16().transpose(1, 2)
            for found, wanted in zip(mine.update(states, -states), other.update(states, -states), strict=True):
                assert torch.equal(found, wanted)
            assert mine.get_seq_length() == other.get_seq_length()
        mine.reset()
        other.reset()
