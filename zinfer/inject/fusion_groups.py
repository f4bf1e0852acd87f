"""Finds linear layers of a module with the same input: queries, keys and values; gate and up of a gated MLP.

Adjacent in a slab, their weights form one matrix. A module's own forward is run with stand-ins that record their
inputs; it may fail because its other arguments are missing, but only after the first products. The result only decides
the layout of a slab; each call checks whether one product can serve several layers (`SharedProduct`).
"""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from zinfer.inject.overlay import probe, stand_in
from zinfer.model.partition import ModelBlock
from zinfer.offload.block import SlabTensor
from zinfer.weights.slab_matrix import SlabMatrix, are_rows_of_one


@dataclass(frozen=True)
class FusionGroup:
    """Layers that one product can compute.

    Attributes:
        module: the name of the module that they belong to.
        layers: their names in it, in the order in which it calls them.
        leaves: names of each layer's parameters: "weight", or "weight" and "bias".
    """

    module: str
    layers: tuple[str, ...]
    leaves: tuple[str, ...]

    @property
    def parameters(self) -> list[tuple[str, ...]]:
        """Names, in the model, of the parameters that must be adjacent in a slab."""
        return [tuple(f"{self.module}.{layer}.{leaf}" for layer in self.layers) for leaf in self.leaves]


class _InputRecorder(nn.Module):
    """Stands in for a linear layer: records its input, and returns a tensor of its output's shape."""

    def __init__(self, name: str, width: int, inputs: list[tuple[str, torch.Tensor]]) -> None:
        super().__init__()
        self._name, self._width, self._inputs = name, width, inputs

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self._inputs.append((self._name, input))
        return input.new_empty((*input.shape[:-1], self._width))


class _Identity(nn.Module):
    """Stands in for any other submodule, such as a norm or an activation."""

    def forward(self, input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return input


def find_packs(model: nn.Module) -> list[FusionGroup]:
    """Return the groups of all modules that are not patched; parameters may be placeholders."""
    return [pack for name, module in model.named_modules() for pack in _packs_of(name, module)]


def packs_in(blocks: Iterable[ModelBlock], packs: Iterable[FusionGroup], model: nn.Module) -> list[FusionGroup]:
    """Return the groups whose weights form one matrix in the blocks' slabs, and whose biases form one vector."""
    places: dict[tuple[nn.Module, str], tuple[int, SlabTensor]] = {}
    for block in blocks:
        tensors = {tensor.name: tensor for tensor in block.block.layout.tensors}
        for binding in block.bindings:
            places[binding.module, binding.leaf] = block.block.index, tensors[binding.tensor]
    return [pack for pack in packs if all(_are_one(pack, leaf, places, model) for leaf in pack.leaves)]


def _are_one(
    pack: FusionGroup, leaf: str, places: Mapping[tuple[nn.Module, str], tuple[int, SlabTensor]], model: nn.Module
) -> bool:
    module = model.get_submodule(pack.module)
    blocks, tensors = zip(*(places[module.get_submodule(layer), leaf] for layer in pack.layers), strict=True)
    strips = zip(*(tensor.parts() if isinstance(tensor, SlabMatrix) else [tensor] for tensor in tensors), strict=True)
    return (
        len(set(blocks)) == 1
        and are_rows_of_one(tensors)
        and all(one.end == other.offset for strip in strips for one, other in pairwise(strip))
    )


def _packs_of(name: str, module: nn.Module) -> Iterator[FusionGroup]:
    linear = {
        child: part
        for child, part in module._modules.items()
        if type(part) is nn.Linear and part._parameters.get("weight") is not None  # not computed by weight_norm's hook
    }
    if not name or len(linear) < 2 or any("forward" in part.__dict__ for part in (module, *linear.values())):
        return
    inputs: list[tuple[str, torch.Tensor]] = []
    parts: dict[str, nn.Module] = {child: _Identity() for child, part in module._modules.items() if part is not None}
    parts |= {child: _InputRecorder(child, part.out_features, inputs) for child, part in linear.items()}
    forward = type(module).forward
    x = torch.empty((1, 2, next(iter(linear.values())).in_features), dtype=torch.float32, device="meta")
    probe(forward, stand_in(module, **parts), x, *[None] * (_num_required(forward) - 2))
    alike: dict[tuple[object, ...], list[str]] = {}
    for child, given in inputs:
        part = linear[child]
        key = id(given), part.in_features, part.weight.dtype, part.bias is None
        alike.setdefault(key, []).append(child)
    for children in alike.values():
        if 1 < len(children) == len(set(children)):
            leaves = ("weight",) if linear[children[0]].bias is None else ("weight", "bias")
            yield FusionGroup(name, tuple(children), leaves)


def _num_required(forward: Any) -> int:
    """Return the number of required arguments, including the module itself."""
    parameters = inspect.signature(forward).parameters.values()
    is_named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(each.default is each.empty and each.kind in is_named for each in parameters)
