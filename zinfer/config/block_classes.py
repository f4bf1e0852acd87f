"""The value of `injection_policy`: which classes of modules are blocks, and which linear layers in them end a sum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from torch import nn

from zinfer.config.values import Unusable

_EXPECTED: Final = 'an object like {Block: ("attn.out_proj", "mlp.fc2")}: classes of modules, and linear layers in them'


@dataclass(frozen=True)
class BlockClass:
    """A class of modules, itself or by its name, and the ends of names of linear layers in them.

    DeepSpeed adds up over GPUs what comes out of those layers; on one GPU nothing has to be added, and they only tell
    whether the policy was written for the model.
    """

    kind: type[nn.Module] | str
    linears: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.kind if isinstance(self.kind, str) else self.kind.__name__

    def is_class_of(self, module: nn.Module) -> bool:
        """Whether the module is a block of this kind."""
        if isinstance(self.kind, str):
            return type(module).__name__ == self.kind
        return isinstance(module, self.kind)


def block_classes(value: object) -> tuple[BlockClass, ...] | None:
    """The classes that a policy names; None where it names none."""
    if not isinstance(value, Mapping):
        raise Unusable(_EXPECTED)
    found = []
    for kind, linears in value.items():
        is_class = isinstance(kind, type) and issubclass(kind, nn.Module)
        names = (linears,) if isinstance(linears, str) else linears
        if not (is_class or isinstance(kind, str)) or not isinstance(names, list | tuple):
            raise Unusable(_EXPECTED)
        if not all(isinstance(name, str) and name for name in names):
            raise Unusable(_EXPECTED)
        found.append(BlockClass(kind, tuple(names)))
    return tuple(found) or None
