"""Checks the classes of layers that the configuration names."""

from collections.abc import Sequence

from torch import nn

from zinfer.config.block_classes import BlockClass
from zinfer.errors import ConfigError

KEY = "injection_policy"


def check_classes(model: nn.Module, classes: Sequence[BlockClass]) -> None:
    """Refuse a policy that was written for another model.

    Raises:
        ConfigError: names the class, or the linear layer, that the model has not.
    """
    modules = dict(model.named_modules())
    for each in classes:
        if each.is_class_of(model):
            raise ConfigError(f"{KEY}: {each.name} is the model itself; name the class of the blocks in it")
        blocks = [name for name, module in modules.items() if each.is_class_of(module)]
        if not blocks:
            kinds = sorted({type(module).__name__ for module in modules.values()})
            raise ConfigError(
                f"{KEY}: no module of {type(model).__name__} is a {each.name}; its modules are {', '.join(kinds)}"
            )
        for linear in each.linears:
            if not any(name.endswith(linear) for name in modules):
                raise ConfigError(
                    f"{KEY}.{each.name}: {linear!r} is the end of no module's name in {type(model).__name__}; those of "
                    f"{blocks[0]} are {', '.join(name for name, _ in modules[blocks[0]].named_modules() if name)}"
                )
