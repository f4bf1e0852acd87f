"""One product for several linear layers that are given the same numbers.

The layer that a module calls first computes for all; the others take their parts of its output, as views. They do so
only within that one call of the module, and only where they are given the very tensor that the first was given,
unchanged since: a module that does something else after all computes layer by layer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional


class SharedProduct:
    """The product of one module's layers.

    Args:
        plain: the module's forward.
        layers: in the order in which it calls them; ``weight`` and ``bias`` are what lies there at each call.
    """

    def __init__(self, plain: Callable[..., Any], layers: Sequence[nn.Linear]) -> None:
        self._plain = plain
        self._layers = tuple(layers)
        self._is_open = False
        self._input: torch.Tensor | None = None
        self._version = 0
        self._parts: dict[int, torch.Tensor] = {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own, within which its layers share."""
        try:
            self._is_open = True
            return self._plain(*args, **kwargs)
        finally:  # a part that nobody took must not outlive the weights that it was made of
            self._is_open = False
            self._forget()

    def layer_forwards(self) -> list[Callable[..., Any]]:
        """The forward of each layer; methods of what is copied with the module, so that copies have their own."""
        return [_Member(self, index).forward for index in range(len(self._layers))]

    def part(self, index: int, input: torch.Tensor) -> torch.Tensor:
        """One layer's output: [..., in] -> [..., out]."""
        if self._is_open and index == 0:
            self._compute(input)
        if self._input is input and input._version == self._version and index in self._parts:
            return self._parts.pop(index)
        return nn.Linear.forward(self._layers[index], input)

    def _compute(self, input: torch.Tensor) -> None:
        """Make the parts of all layers, if their weights lie together."""
        self._forget()
        weight = joined([layer.weight for layer in self._layers])
        biases = [layer.bias for layer in self._layers if layer.bias is not None]
        bias = joined(biases) if biases else None
        if weight is None or len(biases) not in (0, len(self._layers)) or (biases and bias is None):
            return
        if input.is_inference():  # counts no versions
            return
        product = functional.linear(input, weight, bias)
        parts = torch.split(product, [layer.out_features for layer in self._layers], dim=-1)
        self._input, self._version, self._parts = input, input._version, dict(enumerate(parts))

    def _forget(self) -> None:
        self._input = None
        self._parts = {}


@dataclass(frozen=True, eq=False)
class _Member:
    """One layer of a shared product."""

    product: SharedProduct
    index: int

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.product.part(self.index, input)


def joined(parameters: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """One tensor over the memory of several, [rows of all, ...], where they lie one behind the other; else None."""
    first = parameters[0]
    end, storage = first.data_ptr(), first.untyped_storage().data_ptr()
    for parameter in parameters:
        is_full = type(parameter) is nn.Parameter and not parameter.requires_grad and parameter.is_contiguous()
        is_next = parameter.data_ptr() == end and parameter.untyped_storage().data_ptr() == storage
        if not (is_full and is_next and parameter.dtype == first.dtype and parameter.shape[1:] == first.shape[1:]):
            return None
        end += parameter.nbytes
    shape = (sum(parameter.shape[0] for parameter in parameters), *first.shape[1:])
    return first.as_strided(shape, first.stride())
