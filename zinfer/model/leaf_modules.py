"""Finds the modules that a configuration names as leaves (`zero_optimization.leaf_module`), as DeepSpeed does."""

import logging
from collections.abc import Iterable
from typing import Final

from torch import nn

from zinfer.config.settings import LeafModules
from zinfer.errors import ConfigError

log = logging.getLogger(__name__)

_KEY: Final = "zero_optimization.leaf_module"


def find_leaves(model: nn.Module, layers: Iterable[str], leaves: LeafModules) -> set[nn.Module]:
    """Return the modules that are leaves, each of which is to be in one block.

    Args:
        layers: names of the model's layers, which are blocks.

    Raises:
        ConfigError: a leaf contains layers.
    """
    found: set[nn.Module] = set()
    for name, module in model.named_modules():
        if not _is_leaf(name, module, leaves):
            continue
        inside = [layer for layer in layers if not name or layer.startswith(f"{name}.")]
        if inside:
            raise ConfigError(
                f"{_KEY}: {name or 'the model itself'}, a {type(module).__name__}, contains layers, such as "
                f"{inside[0]}, which stream one by one; name layers, modules in them, or modules outside"
            )
        found.add(module)
    return found


def warn_of_missing(model: nn.Module, leaves: LeafModules) -> None:
    """Log the names that no module has; of classes, which may be listed for several families, if none has any."""
    modules = dict(model.named_modules())
    missing = [each for each in leaves.names if each not in modules]
    missing += [each for each in leaves.suffixes if not any(name.endswith(each) for name in modules)]
    if leaves.classes and not any(_has_class(module, leaves) for module in modules.values()):
        missing += leaves.classes
    if missing:
        log.warning("%s: %s has no module for %s", _KEY, type(model).__name__, ", ".join(missing))


def _is_leaf(name: str, module: nn.Module, leaves: LeafModules) -> bool:
    is_named = name in leaves.names or any(name.endswith(each) for each in leaves.suffixes)
    return is_named or _has_class(module, leaves)


def _has_class(module: nn.Module, leaves: LeafModules) -> bool:
    kind = type(module)
    return kind.__name__ in leaves.classes or f"{kind.__module__}.{kind.__qualname__}" in leaves.classes
