"""Finds the layers of a module tree, and the modules that several of them share."""

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping

from torch import nn

from zinfer.errors import CheckpointError

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def find_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Layers by name, in the model's order, none inside another.

    `_no_split_modules` names a family's layer classes, and embeddings and heads too: layers are those that lie in a
    list. Of a family that names none, they are the members of the outermost lists of modules of one class.

    Raises:
        CheckpointError: the tree has neither.
    """
    named = {
        name: module
        for name, module in model.named_modules()
        if type(module).__name__ in set(getattr(model, "_no_split_modules", None) or ())
    }
    listed = {name: module for name, module in named.items() if _is_listed(model, name)}
    layers = _outermost(listed or named or _alike(model))
    if not layers:
        raise CheckpointError(
            f"{type(model).__name__} names no layer class (_no_split_modules) and holds no list of layers, so it "
            f"cannot be cut into blocks; pass a transformers model of a family that does"
        )
    return layers


def find_shared(model: nn.Module, layers: Mapping[str, nn.Module]) -> set[nn.Module]:
    """Modules with weights that more than one layer holds, or a layer and what lies outside; none for being a part of
    another."""
    holders: dict[nn.Module, set[nn.Module | None]] = defaultdict(set)
    for module in _outside(model, set(layers.values())):
        holders[module].add(None)
    for layer in layers.values():
        for module in layer.modules():
            holders[module].add(layer)
    shared = {each for each, found in holders.items() if len(found) > 1 and any(True for _ in each.parameters())}
    parts = {(part, each) for each in shared for part in each.modules() if part is not each}
    return shared - {part for part, each in parts if holders[part] == holders[each]}


def _outside(module: nn.Module, layers: Container[nn.Module]) -> Iterator[nn.Module]:
    yield module
    for child in module.children():
        if child not in layers:
            yield from _outside(child, layers)


def _is_listed(model: nn.Module, name: str) -> bool:
    return isinstance(model.get_submodule(name.rpartition(".")[0]), _LISTS)


def _alike(model: nn.Module) -> dict[str, nn.Module]:
    """Members of lists whose modules are of one class and have parts."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        members = list(module.children()) if isinstance(module, nn.ModuleList) else []
        if len({type(member) for member in members}) == 1 and any(True for _ in members[0].children()):
            found |= {f"{name}.{key}": member for key, member in module.named_children()}
    return found


def _outermost(modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    return {name: module for name, module in modules.items() if not _is_inside(name, modules)}


def _is_inside(name: str, others: Iterable[str]) -> bool:
    return any(name.startswith(f"{other}.") for other in others)
