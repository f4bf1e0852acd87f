"""Partitions a module tree into blocks: each transformer layer, and each module that holds weights outside them.

Weights tied to each other outside the layers (embedding and head) are one block with several sites of use. A module
that several layers share is a block of its own, used while theirs are. A configuration may name the classes of layers
(`injection_policy`), and modules that are in one block each (`zero_optimization.leaf_module`), as DeepSpeed's does.
"""

import logging
from collections import Counter, defaultdict
from collections.abc import Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

import torch
from torch import nn
from transformers import PreTrainedModel

from zinfer.config.quantization_rules import Quantization
from zinfer.config.settings import NO_LEAVES, LeafModules
from zinfer.config.values import BlockClass
from zinfer.errors import CheckpointError, ConfigError
from zinfer.kernels.quantized import FRAGMENT_ROWS
from zinfer.model.matching import Weight, holds_transpose
from zinfer.model.quantize import Form, find_form, find_rounding
from zinfer.model.sharding.weights import CutTensor
from zinfer.offload.block import Block, Conversion, Extent, SlabLayout, SlabTensor
from zinfer.weights.block_parameter import SlabBlocks
from zinfer.weights.formats.gguf import EncodedTensor
from zinfer.weights.quantized import Quantizing, Rounding, Squares, StoredMatrix, StoredPart
from zinfer.weights.slab_matrix import SlabMatrix, interleave

log = logging.getLogger(__name__)

_POLICY_KEY: Final = "injection_policy"
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
            raise ConfigError(f"{_POLICY_KEY}: {each.name} is the model itself; name the class of the blocks in it")
        blocks = [name for name, module in modules.items() if each.is_class_of(module)]
        if not blocks:
            kinds = sorted({type(module).__name__ for module in modules.values()})
            raise ConfigError(
                f"{_POLICY_KEY}: no module of {type(model).__name__} is a {each.name}; its modules are "
                f"{', '.join(kinds)}"
            )
        for linear in each.linears:
            if not any(name.endswith(linear) for name in modules):
                raise ConfigError(
                    f"{_POLICY_KEY}.{each.name}: {linear!r} is the end of no module's name in {type(model).__name__}; "
                    f"those of {blocks[0]} are "
                    f"{', '.join(name for name, _ in modules[blocks[0]].named_modules() if name)}"
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


_LEAVES_KEY: Final = "zero_optimization.leaf_module"


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
                f"{_LEAVES_KEY}: {name or 'the model itself'}, a {type(module).__name__}, contains layers, such as "
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
        log.warning("%s: %s has no module for %s", _LEAVES_KEY, type(model).__name__, ", ".join(missing))


def _is_leaf(name: str, module: nn.Module, leaves: LeafModules) -> bool:
    is_named = name in leaves.names or any(name.endswith(each) for each in leaves.suffixes)
    return is_named or _has_class(module, leaves)


def _has_class(module: nn.Module, leaves: LeafModules) -> bool:
    kind = type(module)
    return kind.__name__ in leaves.classes or f"{kind.__module__}.{kind.__qualname__}" in leaves.classes


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

    @property
    def num_uses(self) -> int:
        """Loads per pass: a tied embedding and head are one block used twice."""
        return len(self.sites)

    @property
    def is_looked_up(self) -> bool:
        """Whether all modules that use it are embeddings."""
        return all(isinstance(site, nn.Embedding) for site in self.sites)


@dataclass
class _Piece:
    """A block under construction: the modules whose forward uses it, and the names of its parameters."""

    name: str
    sites: list[nn.Module]
    parameters: list[str]
    is_layer: bool
    encloses: bool


def partition_model(
    model: nn.Module,
    weights: Mapping[str, Weight],
    rules: Quantization | None = None,
    squares: Squares | None = None,
    checksums: Mapping[Path, str] = MappingProxyType({}),
    together: Iterable[Sequence[str]] = (),
    classes: Sequence[BlockClass] = (),
    leaves: LeafModules = NO_LEAVES,
    *,
    in_blocks: bool = False,
) -> list[ModelBlock]:
    """Partition a model into blocks, in its own order; every parameter is in exactly one.

    Args:
        model: a transformers model whose class or parts name `_no_split_modules`, or one with blocks of ``classes``.
        weights: the checkpoint's weight of each parameter; empty for a model whose weights are in memory.
        rules: which full-precision weights to quantize, and how; None: none.
        squares: the result of a calibration, used when a weight is quantized; None: no columns are scaled.
        checksums: of files that hold one block each.
        together: groups of parameter names to place next to each other in a slab, if in one block.
        classes: of modules that are layers too.
        leaves: names modules that are in one block each.
        in_blocks: whether weights in GGUF's blocks stay so.

    Raises:
        CheckpointError: the model's layers cannot be found.
        ConfigError: the rules cannot be applied to a weight, or a leaf contains layers; names it.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    weights = {name: _as_multiplied(name, weight, rules) for name, weight in weights.items()}
    bytes_of = {name: weights[name] if weights else id(value) for name, value in parameters.items()}
    packs = {name: tuple(pack) for pack in together for name in pack}
    form = find_form(rules, scales_columns=squares is not None)
    rounding = find_rounding(rules, squares)
    partitioner = _Partitioner(model, parameters, weights, bytes_of, rules, form, rounding, packs, in_blocks)
    layers = find_layers(model, classes)
    pieces = _joined(_pieces(model, layers, find_leaves(model, layers, leaves)), bytes_of)
    blocks = [partitioner.finish(index, piece) for index, piece in enumerate(pieces)]
    return [_with_checksum(block, checksums) for block in blocks]


def _as_multiplied(name: str, weight: Weight, rules: Quantization | None) -> Weight:
    """Return a stored matrix with a scale a row where a product quantizes its input, which multiplies the codes."""
    if rules is None or not isinstance(weight, StoredMatrix) or not rules.quantizes_input(name):
        return weight
    return weight.converted


def _with_checksum(block: ModelBlock, checksums: Mapping[Path, str]) -> ModelBlock:
    files = {extent.file for extent in block.block.read_extents}
    checksum = checksums.get(next(iter(files))) if len(files) == 1 else None
    return replace(block, block=replace(block.block, checksum=checksum))


def _pieces(model: nn.Module, layers: Mapping[str, nn.Module], leaves: Container[nn.Module]) -> Iterator[_Piece]:
    """Yield a piece for each module with weights of its own; a whole module includes its parts, unless they are shared.

    A module that has parameters and parts, or that `_no_split_modules` names, may read its parts' weights itself; it is
    kept whole unless it contains layers.
    """
    shared = find_shared(model, layers)
    classes = set(getattr(model, "_no_split_modules", None) or ())
    whole: list[str] = []
    for name, module in model.named_modules():
        if module not in shared and any(name.startswith(outer) for outer in whole):
            continue
        is_one = type(module).__name__ in classes or any(True for _ in module.parameters(recurse=False))
        is_whole = name in layers or module in shared or module in leaves
        is_whole |= is_one and not any(layer.startswith(f"{name}.") or not name for layer in layers)
        if is_whole:
            whole.append(f"{name}.")
        names = [
            f"{path}.{leaf}" if path else leaf
            for path, part in (_parts(name, module, shared) if is_whole else [(name, module)])
            for leaf, parameter in part._parameters.items()
            if parameter is not None
        ]
        if names:
            encloses = not is_whole and any(next(child.parameters(), None) is not None for child in module.children())
            yield _Piece(name or type(model).__name__, [module], names, name in layers, encloses)


def _parts(path: str, module: nn.Module, shared: Container[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield a module and its parts by path, without shared modules, which are blocks of their own."""
    yield path, module
    for name, child in module.named_children():
        if child not in shared:
            yield from _parts(f"{path}.{name}", child, shared)


def _joined(pieces: Iterable[_Piece], bytes_of: Mapping[str, Hashable]) -> list[_Piece]:
    """Return the pieces, joining those outside the layers that share bytes."""
    joined: list[_Piece] = []
    owner: dict[Hashable, _Piece] = {}
    for piece in pieces:
        keys = [bytes_of[name] for name in piece.parameters]
        first = None if piece.is_layer else next((owner[key] for key in keys if key in owner), None)
        if first is None:
            joined.append(piece)
        else:
            first.sites += piece.sites
            first.parameters += piece.parameters
            first.encloses |= piece.encloses
        if not piece.is_layer:
            owner.update(dict.fromkeys(keys, first or piece))
    return joined


@dataclass(frozen=True)
class _Partitioner:
    """Makes blocks of pieces; parameters with equal values in ``bytes_of`` share their bytes."""

    model: nn.Module
    parameters: Mapping[str, nn.Parameter]
    weights: Mapping[str, Weight]
    bytes_of: Mapping[str, Hashable]
    rules: Quantization | None
    form: Form
    rounding: Rounding
    packs: Mapping[str, tuple[str, ...]]
    in_blocks: bool

    def finish(self, index: int, piece: _Piece) -> ModelBlock:
        first: dict[Hashable, str] = {}
        alias = {name: first.setdefault(self.bytes_of[name], name) for name in piece.parameters}
        names = list(first.values())
        if self.weights:
            names.sort(key=lambda name: (str(self.weights[name].file), self.weights[name].offset))
        names = self._packed(names)
        prefix = f"{piece.name}." if piece.is_layer else ""  # equal layers then have equal layouts
        layout = SlabLayout.place(replace(self._form_of(name), name=name.removeprefix(prefix)) for name in names)
        packs = {self.packs[name] for name in names if name in self.packs}
        layout = interleave(layout, ([name.removeprefix(prefix) for name in pack] for pack in packs))
        bindings = tuple(
            Binding(
                self.model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], target.removeprefix(prefix)
            )
            for name, target in alias.items()
        )
        block = Block(index, piece.name, layout, encloses=piece.encloses)
        if any(self._converts(name, tensor) for name, tensor in zip(names, layout.tensors, strict=True)):
            block = replace(block, conversion=self._conversion(block, names))
        elif self.weights:
            block = replace(block, extents=tuple(self._extents(layout, names)))
        return ModelBlock(block, tuple(piece.sites), bindings, piece.is_layer)

    def _packed(self, names: list[str]) -> list[str]:
        """Return the names, with those of a pack moved to its first one."""
        followed = (each for name in names for each in self.packs.get(name, (name,)))
        there = set(names)
        return [name for name in dict.fromkeys(followed) if name in there]

    def _form_of(self, name: str) -> SlabTensor:
        module, parameter = self.model.get_submodule(name.rpartition(".")[0]), self.parameters[name]
        weight = self.weights.get(name)
        if isinstance(weight, EncodedTensor) and self.in_blocks:
            return SlabBlocks(name, parameter.dtype, tuple(parameter.shape), forms=weight.forms)
        if not isinstance(weight, StoredMatrix):
            return self.form(name, module, parameter)
        if (other := self._other_form(name, module, parameter, weight)) is not None:
            return other
        shape, transposed = tuple(parameter.shape), holds_transpose(module, parameter.dim())
        stored = SlabMatrix(name, parameter.dtype, shape, format=weight.format, transposed=transposed)
        if not weight.encoding.is_native and all(piece.rows % FRAGMENT_ROWS == 0 for piece in weight.pieces):
            stored = stored.arranged
        if self.rules is None or not self.rules.quantizes_input(name):
            return stored
        if not (weight.format.multiplies_int8 or weight.format.multiplies_fp8):
            raise ConfigError(
                f"zinfer.quantization.activations: {name} is stored as {weight.format}, but products with quantized "
                "activations take symmetric INT8 or FP8 with a scale a row; set it to false, leave the weight out "
                "(zinfer.quantization.exclude), or quantize the full model with bits 8"
            )
        return replace(stored, quantizes_input=True)

    def _other_form(
        self, name: str, module: nn.Module, parameter: nn.Parameter, weight: StoredMatrix
    ) -> SlabMatrix | None:
        """Return the form that rules ask for in place of published floats; None: these are kept, as other codes are."""
        if self.rules is None or self.rules.activations or not (weight.format.in_grid and weight.encoding.is_native):
            return None
        wanted = self.form(name, module, parameter)
        if not isinstance(wanted, SlabMatrix) or (wanted.format.is_float and wanted.format.bits == weight.format.bits):
            return None
        return wanted

    def _converts(self, name: str, tensor: SlabTensor) -> bool:
        """Whether the stored parameter must be converted, not only copied into the slab."""
        weight = self.weights.get(name)
        if isinstance(weight, EncodedTensor):
            return not isinstance(tensor, SlabBlocks)
        if not isinstance(weight, StoredMatrix) or not isinstance(tensor, SlabMatrix):
            return isinstance(tensor, SlabMatrix)
        return not weight.encoding.is_native or not weight.is_kept_by(tensor)

    def _extents(self, layout: SlabLayout, names: list[str]) -> Iterator[Extent]:
        """Yield the extents of weights that are stored in the slab's form."""
        for name, tensor in zip(names, layout.tensors, strict=True):
            weight = self.weights[name]
            if isinstance(weight, EncodedTensor):
                assert isinstance(tensor, SlabBlocks), "others are converted"
                for blocks, place in zip(weight.blocks, tensor.parts(), strict=True):
                    yield from find_extents(blocks, place)
            elif not isinstance(weight, StoredMatrix):
                yield from find_extents(weight, tensor)
            else:
                assert isinstance(tensor, SlabMatrix)
                for entry, part in weight.placed(tensor):
                    yield from find_extents(entry, part)

    def _conversion(self, block: Block, names: list[str]) -> Conversion:
        """Return the conversion of the block's stored weights into its slab."""
        stored: list[tuple[str, torch.dtype, tuple[int, ...]]] = []
        entries: list[StoredPart] = []
        matrices: dict[str, StoredMatrix] = {}
        encoded: dict[str, EncodedTensor] = {}
        for name, tensor in zip(names, block.layout.tensors, strict=True):
            weight = self.weights.get(name)
            if isinstance(weight, StoredMatrix):
                matrices[tensor.name] = weight
                stored += [(f"{tensor.name}.{part}", entry.dtype, entry.shape) for part, entry in weight.parts]
                entries += [entry for _, entry in weight.parts]
            elif isinstance(weight, EncodedTensor):
                encoded[tensor.name] = weight
                stored += [(f"{tensor.name}.{n}", each.dtype, each.shape) for n, each in enumerate(weight.blocks)]
                entries += weight.blocks
            else:
                stored.append((tensor.name, (weight or self.parameters[name]).dtype, tensor.shape))
                entries += [weight] if weight else []
        layout = SlabLayout.pack(stored)
        placed = zip(entries, layout.tensors, strict=False)
        extents = tuple(extent for entry, tensor in placed for extent in find_extents(entry, tensor))
        in_model = {tensor.name: name for name, tensor in zip(names, block.layout.tensors, strict=True)}
        make = Quantizing(block.name, layout, block.layout, matrices, encoded, self.rounding, in_model)
        return Conversion(layout, extents, make)


def find_extents(weight: StoredPart, tensor: SlabTensor) -> Iterator[Extent]:
    """Yield the extents of a parameter; in the slab its pieces follow one another."""
    if isinstance(weight, CutTensor):
        yield from weight.extents(tensor)
        return
    begin = tensor.offset
    for piece in weight.pieces:
        yield Extent(piece.file, piece.offset, piece.nbytes, piece.dtype, begin, tensor.dtype)
        begin += piece.nbytes // piece.dtype.itemsize * tensor.dtype.itemsize
