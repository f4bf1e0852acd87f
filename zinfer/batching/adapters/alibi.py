"""Slopes of ALiBi (Press et al. 2022, "Train short, test long") as BLOOM and Falcon take them."""

import math

import torch


def alibi_slopes(num_heads: int, device: torch.device) -> torch.Tensor:
    """[heads] float32: powers of one base for the largest power of two of heads, the others of a finer one."""
    whole = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * (head + 1) / whole) for head in range(whole)]
    slopes += [2 ** (-4 * (2 * head + 1) / whole) for head in range(num_heads - whole)]
    return torch.tensor(slopes, dtype=torch.float32, device=device)
