"""torch.compile for what layers compute beside attention: norms and feed-forwards, the same code in all layers.

A whole layer would be compiled anew for each number of keys and values, and for each layer, because its code reads its
own index; torch gives up after a few. Whole forwards are rather replayed (`zinfer/graphs`).
"""

from collections.abc import Iterable, Mapping

import torch
from torch import nn


class CompiledParts:
    """Compiles the parts of layers that keep nothing, until `remove`; those that are overlaid already are left alone.

    Args:
        layers: the transformer's.
        backend, options: for `torch.compile`.
    """

    def __init__(self, layers: Iterable[nn.Module], backend: str, options: Mapping[str, object]) -> None:
        parts = (part for layer in layers for part in layer.children())
        self._parts = [part for part in parts if not _keeps(part) and "forward" not in part.__dict__]
        for part in self._parts:
            part.forward = torch.compile(part.forward, backend=backend, **options)  # type: ignore[call-overload]

    def __len__(self) -> int:
        return len(self._parts)

    def remove(self) -> None:
        """Let the parts compute as before. May be called again."""
        while self._parts:
            del self._parts.pop().forward


def _keeps(part: nn.Module) -> bool:
    """Whether something in it knows its layer's number, as whatever has keys and values does."""
    return any(hasattr(module, "layer_idx") or hasattr(module, "layer_number") for module in part.modules())
