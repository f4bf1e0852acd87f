"""`PickedInput`: the input of a module whose weight has groups of columns in activation order (desc_act)."""

from typing import Any, Final

import torch
from torch import nn

from zinfer.ranks.communicator import Communicator
from zinfer.weights.parameter import QuantizedParameter

_MOST_ELEMENTS: Final = 8 << 20  # of the whole input at a time: some 16 MB beside the activations


class PickedInput:
    """Hands a module the columns of its input that its weight names (`QuantizedParameter.picked`).

    They may be in the parts of all ranks, which are joined for it, some tokens at a time. Parts may differ in width.

    Args:
        others: the ranks that divide the module.
        is_divided: whether each rank has its part of the input alone; else all have it whole.
    """

    def __init__(self, others: Communicator, *, is_divided: bool) -> None:
        self._others, self._is_divided = others, is_divided
        self._widths: list[int] = []  # of the ranks' parts

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the module's arguments; a pre-hook, called while the module's weight is there."""
        weight, given = module._parameters["weight"], args[0]
        assert isinstance(weight, QuantizedParameter)
        assert weight.picked is not None
        rows = given.reshape(-1, given.shape[-1])
        if self._is_divided and not self._widths:
            width = torch.tensor([rows.shape[1]], dtype=torch.int32, device=rows.device)
            self._widths = self._others.all_gather(width).flatten().tolist()
        total = sum(self._widths) if self._is_divided else rows.shape[1]
        parts = rows.split(max(1, _MOST_ELEMENTS // total))
        picked = torch.cat([self._whole(part).index_select(1, weight.picked) for part in parts])
        return picked.view(*given.shape[:-1], -1), *args[1:]

    def _whole(self, part: torch.Tensor) -> torch.Tensor:
        """Return some rows of the input with the columns of all ranks."""
        if not self._is_divided:
            return part
        padded = nn.functional.pad(part, (0, max(self._widths) - part.shape[1]))
        found = self._others.all_gather(padded)
        return torch.cat([each[:, :width] for each, width in zip(found, self._widths, strict=True)], 1)
