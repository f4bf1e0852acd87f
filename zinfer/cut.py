"""Cuts a module tree into blocks: each transformer layer is one, and so is each module that holds weights outside them.

`_no_split_modules` names a family's layer class. Weights that are tied to each other outside the layers (embedding and
head) are one block with several places of use.
"""

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from zinfer.checkpoint import TensorEntry
from zinfer.errors import CheckpointError
from zinfer.offload.block import Block, Extent, SlabLayout


@dataclass(frozen=True)
class Binding:
    """A module's parameter slot and the slab tensor that goes into it while the block is in use."""

    module: nn.Module
    leaf: str
    tensor: str


@dataclass(frozen=True)
class ModelBlock:
    """A block and its places in the model: ``sites`` are the modules whose forward uses it."""

    block: Block
    sites: tuple[nn.Module, ...]
    bindings: tuple[Binding, ...]
    is_layer: bool


@dataclass
class _Piece:
    """A block in the making: parameter names grouped by the modules that use them."""

    name: str
    sites: list[nn.Module]
    parameters: list[str]
    is_layer: bool


def cut_model(model: nn.Module, weights: Mapping[str, TensorEntry]) -> list[ModelBlock]:
    """The blocks of a model in its own order; every parameter is in exactly one.

    Args:
        model: a transformers model whose class or parts name `_no_split_modules`.
        weights: the checkpoint tensor of each parameter; empty for a model whose weights are in memory.

    Raises:
        CheckpointError: the model does not say which of its modules are layers.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    bytes_of = {name: weights[name] if weights else id(value) for name, value in parameters.items()}
    cutter = _Cutter(model, parameters, weights, bytes_of)
    return [cutter.finish(index, piece) for index, piece in enumerate(cutter.pieces())]


@dataclass(frozen=True)
class _Cutter:
    """One cut: ``bytes_of`` tells which parameters share their bytes, by equal values."""

    model: nn.Module
    parameters: Mapping[str, nn.Parameter]
    weights: Mapping[str, TensorEntry]
    bytes_of: Mapping[str, Hashable]

    def pieces(self) -> list[_Piece]:
        """Layers, and the modules that hold weights outside them; the latter joined where they share bytes."""
        pieces: list[_Piece] = []
        owner: dict[Hashable, _Piece] = {}
        for name, module, is_layer in _holders(self.model):
            own = module.named_parameters(recurse=is_layer, remove_duplicate=False)
            names = [f"{name}.{leaf}" if name else leaf for leaf, _ in own]
            if not names:
                continue
            keys = [self.bytes_of[full] for full in names]
            joined = None if is_layer else next((owner[key] for key in keys if key in owner), None)
            if joined is None:
                joined = _Piece(name, [], [], is_layer)
                pieces.append(joined)
            joined.sites.append(module)
            joined.parameters += names
            if not is_layer:
                owner.update(dict.fromkeys(keys, joined))
        return pieces

    def finish(self, index: int, piece: _Piece) -> ModelBlock:
        first: dict[Hashable, str] = {}
        alias = {name: first.setdefault(self.bytes_of[name], name) for name in piece.parameters}
        names = list(first.values())
        if self.weights:
            names.sort(key=lambda name: (str(self.weights[name].file), self.weights[name].offset))
        prefix = f"{piece.name}." if piece.is_layer else ""  # equal layers then have equal layouts
        layout = SlabLayout.pack(
            (name.removeprefix(prefix), self.parameters[name].dtype, tuple(self.parameters[name].shape))
            for name in names
        )
        extents = tuple(_extents(layout, [self.weights[name] for name in names])) if self.weights else ()
        bindings = tuple(self._binding(name, target.removeprefix(prefix)) for name, target in alias.items())
        return ModelBlock(Block(index, piece.name, layout, extents), tuple(piece.sites), bindings, piece.is_layer)

    def _binding(self, name: str, tensor: str) -> Binding:
        path, _, leaf = name.rpartition(".")
        return Binding(self.model.get_submodule(path), leaf, tensor)


def _holders(model: nn.Module) -> Iterator[tuple[str, nn.Module, bool]]:
    """Modules that may hold weights: ``(name, module, whether it is a layer)``, none inside a layer."""
    layer_classes = set(getattr(model, "_no_split_modules", None) or ())
    if not layer_classes:
        raise CheckpointError(
            f"{type(model).__name__} names no layer class (_no_split_modules), so it cannot be cut into blocks; "
            f"pass a transformers model of a family that does"
        )
    layers: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(layer) for layer in layers):
            continue
        is_layer = type(module).__name__ in layer_classes
        if is_layer:
            layers.append(f"{name}.")
        yield name, module, is_layer


def _extents(layout: SlabLayout, entries: list[TensorEntry]) -> Iterator[Extent]:
    for tensor, entry in zip(layout.tensors, entries, strict=True):
        yield Extent(entry.file, entry.offset, entry.nbytes, entry.dtype, tensor.offset, tensor.dtype)
