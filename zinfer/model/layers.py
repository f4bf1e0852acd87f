"""Finds the layers of a module tree, and the modules that several of them share."""

from collections import Counter, defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Final

from torch import nn
from transformers import PreTrainedModel

from zinfer.config.values import BlockClass
from zinfer.errors import CheckpointError, ConfigError

_KEY: Final = "injection_policy"
_LISTS: Final = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_WITHOUT_FORWARD: Final = (nn.ModuleList, nn.ModuleDict)


def find_layers(model: nn.Module, classes: Sequence[BlockClass] = ()) -> dict[str, nn.Module]:
    """Return the layers by name, in the model's order, none inside another.

    `_no_split_modules` names a family's layer classes, but also embeddings and heads: of these modules, the ones in a
    list are layers. If it names none, layers are the members of the outermost lists of modules of one class; for a
    module that is not one of transformers', the modules of `find_repeated`, which may be none.

    Args:
        classes: of modules that are always layers.

    Raises:
        CheckpointError: there are no layers in a transformers model.
    """
    modules = dict(model.named_modules())
    chosen = {name for name, module in modules.items() if any(each.is_class_of(module) for each in classes)}
    family = set(getattr(model, "_no_split_modules", None) or ())
    named = {name for name, module in modules.items() if type(module).__name__ in family}
    listed = {name for name in named if isinstance(modules[name.rpartition(".")[0]], _LISTS)}
    found = chosen | (listed or named)
    if not found:
        found = _alike(model) if isinstance(model, PreTrainedModel) else find_repeated(model)
    layers = {
        name: module
        for name, module in modules.items()
        if name in found and not any(name.startswith(f"{other}.") for other in found)
    }
    if not layers and isinstance(model, PreTrainedModel):
        raise CheckpointError(
            f"{type(model).__name__} names no layer class (_no_split_modules) and holds no list of layers, so it "
            "cannot be partitioned into blocks; name one: injection_policy={Block: (linear layers)}"
        )
    return layers


def find_repeated(model: nn.Module) -> set[str]:
    """Return the names of modules, with weights and a forward, that share a list or Sequential with another module of
    their class."""
    found: set[str] = set()
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            kinds = Counter(map(type, module._modules.values()))
            found |= {
                f"{name}.{key}" if name else key
                for key, member in module._modules.items()
                if kinds[type(member)] > 1 and not isinstance(member, _WITHOUT_FORWARD) and _has_weights(member)
            }
    return found


def _has_weights(module: nn.Module | None) -> bool:
    return module is not None and any(True for _ in module.parameters())


def check_classes(model: nn.Module, classes: Sequence[BlockClass]) -> None:
    """Refuse an injection policy that was written for another model.

    Raises:
        ConfigError: names the class, or the linear layer, that the model lacks.
    """
    modules = dict(model.named_modules())
    for each in classes:
        if each.is_class_of(model):
            raise ConfigError(f"{_KEY}: {each.name} is the model itself; name the class of the blocks in it")
        blocks = [name for name, module in modules.items() if each.is_class_of(module)]
        if not blocks:
            kinds = sorted({type(module).__name__ for module in modules.values()})
            raise ConfigError(
                f"{_KEY}: no module of {type(model).__name__} is a {each.name}; its modules are {', '.join(kinds)}"
            )
        for linear in each.linears:
            if not any(name.endswith(linear) for name in modules):
                raise ConfigError(
                    f"{_KEY}.{each.name}: {linear!r} is the end of no module's name in {type(model).__name__}; those "
                    f"of {blocks[0]} are {', '.join(name for name, _ in modules[blocks[0]].named_modules() if name)}"
                )


def find_shared(model: nn.Module, layers: Mapping[str, nn.Module]) -> set[nn.Module]:
    """Return modules with weights shared by several layers, or by a layer and the rest of the model.

    Only the outermost modules count: parts of a shared module with the same holders are left out.
    """
    holders: dict[nn.Module, set[nn.Module | None]] = defaultdict(set)
    for module in _outside(model, set(layers.values())):
        holders[module].add(None)
    for layer in layers.values():
        for module in layer.modules():
            holders[module].add(layer)
    shared = {each for each, found in holders.items() if len(found) > 1 and _has_weights(each)}
    parts = {(part, each) for each in shared for part in each.modules() if part is not each}
    return shared - {part for part, each in parts if holders[part] == holders[each]}


def _outside(module: nn.Module, layers: Container[nn.Module]) -> Iterator[nn.Module]:
    yield module
    for child in module.children():
        if child not in layers:
            yield from _outside(child, layers)


def _alike(model: nn.Module) -> set[str]:
    """Return the names of members of lists whose modules are all of one class and have submodules."""
    found: set[str] = set()
    for name, module in model.named_modules():
        members = list(module.children()) if isinstance(module, nn.ModuleList) else []
        if len({type(member) for member in members}) == 1 and any(True for _ in members[0].children()):
            found |= {f"{name}.{key}" for key, _ in module.named_children()}
    return found
