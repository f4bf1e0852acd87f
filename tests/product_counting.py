"""Counts the products of linear layers."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.nn import functional


@contextmanager
def counted_products() -> Iterator[list[int]]:
    """The rows of each linear product that is computed inside; not of those that it consists of."""
    linear, rows, depth = functional.linear, list[int](), 0

    def counted(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        nonlocal depth
        rows.extend([weight.shape[0]] * (not depth))
        depth += 1
        try:
            return linear(input, weight, bias)
        finally:
            depth -= 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functional, "linear", counted)
        yield rows
