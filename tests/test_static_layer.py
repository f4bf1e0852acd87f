"""A layer's keys and values as the kernel writes them, beside transformers' own."""

import torch
from transformers.cache_utils import StaticLayer

from zinfer.graphs.static_layer import FusedStaticLayer


def test_a_layer_keeps_what_transformers_own_keeps(kernel_device: str) -> None:
    torch.manual_seed(0)
    mine, other = FusedStaticLayer(16), StaticLayer(16)
    for _ in range(2):
        for tokens in (9, 1, 1):
            states = torch.randn(2, tokens, 3, 24, device=kernel_device).bfloat16().transpose(1, 2)
            if not mine.is_initialized:
                mine.lazy_initialization(states, -states)
                mine.device = torch.device("cuda")  # where the kernel writes, interpreted or not
            for found, wanted in zip(mine.update(states, -states), other.update(states, -states), strict=True):
                assert torch.equal(found, wanted)
            assert mine.get_seq_length() == other.get_seq_length()
        mine.reset()
        other.reset()
