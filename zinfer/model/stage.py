"""Modules with some of their layers: `ShorterModel`, and `StageModel` for one stage of a pipeline.

[Note: a shorter model]
Other layers leave the module's list, so they are neither read nor homed, and nothing calls them. The config states the
number and kinds of the layers that are left, and these are numbered from 0; so caches, pages and budgets are those of
the shorter model. Names of parameters stay those of the whole one.

Embeddings are on the first stage of a pipeline, the head and what follows the layers in the tree on the last; elsewhere
modules without weights stand for them. Their outputs are not used: the stage's first layer gets the hidden states of
the stage before. Other modules in front of the layers, such as OPT's projections, are small and stay on every stage.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Final, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from zinfer.config.values import BlockClass
from zinfer.errors import ConfigError
from zinfer.model.partition import find_layers

_BY_LAYER: Final = ("layer_types", "mlp_layer_types", "num_attention_heads_per_layer")
"""Members of a config with an entry for each layer."""
_T = TypeVar("_T")


class ShorterModel:
    """Cuts a model down to some of its layers with `apply`, until `undo`; reads no weights.

    Args:
        model: whose code calls its layers one after the other.
        layers: all of them, by name.
        bounds: the first layer that stays, and the first one after it that does not.
        absent: what takes the place of other modules, by their paths.

    Attributes:
        layers: those that stay, by name.
        num_all: the number of layers before.

    Raises:
        ConfigError: the layers are not one list, or the config cannot state fewer.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layers: Mapping[str, nn.Module],
        bounds: tuple[int, int],
        absent: Mapping[str, nn.Module],
    ) -> None:
        self._model, self._absent = model, absent
        self._begin, self.num_all = bounds[0], len(layers)
        self._list = _list_of(model, layers)
        self.layers = dict(list(layers.items())[slice(*bounds)])
        self._undone: list[Callable[[], object]] = []
        config = model.config.get_text_config(decoder=True)
        for name in ("num_hidden_layers", *(name for name, _ in lists_by_layer(config, len(layers)))):
            held = getattr(type(config), config.attribute_map.get(name, name), None)
            if not hasattr(config, name) or getattr(held, "fset", config) is None:
                raise ConfigError(f"the config of a {type(model).__name__} states no {name} that could be lowered")

    @classmethod
    def of_each_kind(
        cls, model: PreTrainedModel, classes: Sequence[BlockClass] = (), num_more: int = 0
    ) -> "ShorterModel":
        """Return the model with its first layers, as few as have all kinds among them: one, where all are alike.

        Args:
            classes: of modules that are layers too.
            num_more: layers behind these.
        """
        layers = find_layers(model, classes)
        return cls(model, layers, (0, min(len(layers), count_to_all_kinds(model, layers) + num_more)), {})

    def apply(self) -> None:
        """Cut the model down; call it once, or again after `undo`."""
        assert not self._undone, "the model is cut down already"
        own = set(self.layers.values())
        self._replace(self._list, {key: layer for key, layer in self._list._modules.items() if layer in own})
        for path, stand_in in self._absent.items():
            parent, _, leaf = path.rpartition(".")
            module = self._model.get_submodule(parent)
            self._replace(module, {**module._modules, leaf: stand_in})
        for layer in self.layers.values():
            for module in layer.modules():
                if isinstance(number := vars(module).get("layer_idx"), int):
                    self._set(module, "layer_idx", number - self._begin)
        config: Any = self._model.config.get_text_config(decoder=True)
        for name, values in lists_by_layer(config, self.num_all):
            self._set(config, name, values[self._begin : self._begin + len(self.layers)])
        self._set(config, "num_hidden_layers", len(self.layers))

    def undo(self) -> None:
        """Give the model all its modules again; parameters are left. Idempotent."""
        while self._undone:
            self._undone.pop()()

    def own(self, weights: Mapping[str, _T]) -> dict[str, _T]:
        """Return what is given by the names of parameters and buffers, for those that are left."""
        held = self._model.state_dict(keep_vars=True)
        return {name: weight for name, weight in weights.items() if name in held}

    def _replace(self, parent: nn.Module, modules: Mapping[str, nn.Module | None]) -> None:
        self._undone.append(partial(_hold, parent, dict(parent._modules)))
        _hold(parent, modules)

    def _set(self, target: Any, name: str, value: object) -> None:
        self._undone.append(partial(setattr, target, name, getattr(target, name)))
        setattr(target, name, value)


def count_to_all_kinds(model: PreTrainedModel, layers: Mapping[str, nn.Module]) -> int:
    """Return how many of these layers, from the first one, have all kinds among them."""
    kinds = [*_kinds(model, layers)]
    return 1 + max(map(kinds.index, set(kinds)))


def _kinds(model: PreTrainedModel, layers: Mapping[str, nn.Module]) -> Iterator[Hashable]:
    """Yield what tells the kind of each layer: what the config calls it, and its modules' classes and shapes."""
    config = model.config.get_text_config(decoder=True)
    lists = [values for _, values in lists_by_layer(config, len(layers))]
    for number, layer in enumerate(layers.values()):
        classes = [type(module) for module in layer.modules()]
        shapes = [(name, each.shape) for name, each in layer.named_parameters()]
        yield (*(str(values[number]) for values in lists), *classes, *shapes)


def lists_by_layer(config: Any, num_layers: int) -> Iterator[tuple[str, Sequence[Any]]]:
    """Yield the members of a config that have an entry for each of so many layers."""
    for name in _BY_LAYER:
        values = getattr(config, name, None)
        if isinstance(values, list | tuple) and len(values) == num_layers:
            yield name, values


def _hold(parent: nn.Module, modules: Mapping[str, nn.Module | None]) -> None:
    """Give a module these submodules, in this order."""
    parent._modules.clear()
    parent._modules.update(modules)


def _list_of(model: nn.Module, layers: Mapping[str, nn.Module]) -> nn.ModuleList:
    paths = {name.rpartition(".")[0] for name in layers}
    found = model.get_submodule(next(iter(paths)))
    if len(paths) != 1 or not isinstance(found, nn.ModuleList) or len(found) != len(layers):
        raise ConfigError(f"the layers of a {type(model).__name__} are not one list, of which some could stay")
    return found


_KEY: Final = "zinfer.parallel.pipeline"


@dataclass(frozen=True)
class Stage:
    """Stage ``number`` of ``count``."""

    number: int
    count: int

    @property
    def is_first(self) -> bool:
        return self.number == 0

    @property
    def is_last(self) -> bool:
        return self.number == self.count - 1


class StageModel(ShorterModel):
    """Cuts a model down to one stage's layers with `apply`, until `undo`; reads no weights.

    Args:
        model: a decoder of a family that runs in ragged batches, whose code calls its layers one after the other with
            hidden states as first argument and result.
        stage: the stage.
        classes: of modules that are layers too.

    Raises:
        ConfigError: the model cannot be divided so, or has fewer layers than there are stages.
    """

    def __init__(self, model: PreTrainedModel, stage: Stage, classes: Sequence[BlockClass] = ()) -> None:
        _check(model)
        self.stage = stage
        layers = find_layers(model, classes)
        if len(layers) < stage.count:
            raise ConfigError(
                f"{_KEY} is {stage.count}, but a {type(model).__name__} of {len(layers)} layers has only that many "
                f"stages; set it to {len(layers)} at most, and replicas for the other ranks"
            )
        sizes = [sum(each.nbytes for each in layer.parameters()) for layer in layers.values()]
        absent = dict(_absent_modules(model, layers, stage))
        try:
            super().__init__(model, layers, divide(sizes, stage.count)[stage.number], absent)
        except ConfigError as error:
            raise ConfigError(f"{_KEY}: {error}") from error


def divide(sizes: Sequence[int], count: int) -> list[tuple[int, int]]:
    """Divide a sequence into contiguous ranges, none empty, so that the largest sum is as small as possible."""

    @cache
    def best(begin: int, num_left: int) -> tuple[int, tuple[int, ...]]:
        """Return the largest sum and the ends, for what follows ``begin``."""
        if num_left == 1:
            return sum(sizes[begin:]), (len(sizes),)
        found = []
        for end in range(begin + 1, len(sizes) - num_left + 2):
            most, ends = best(end, num_left - 1)
            found.append((max(sum(sizes[begin:end]), most), (end, *ends)))
        return min(found)

    ends = best(0, count)[1]
    return list(zip((0, *ends), ends, strict=False))


class _Passing(nn.Module):
    """Stands for a module behind the layers: returns its input."""

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return hidden


class _NoEmbedding(nn.Module):
    """Stands for an embedding: zeros.

    Args:
        is_input: the first argument is the tokens' ids [rows, tokens]; else one vector serves all of them.
    """

    def __init__(self, width: int, dtype: torch.dtype, *, is_input: bool) -> None:
        super().__init__()
        self._width, self._dtype, self._is_input = width, dtype, is_input

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
        shape = tensors[0].shape if self._is_input else (1, 1)
        device = tensors[0].device if tensors else None
        return torch.zeros((*shape, self._width), dtype=self._dtype, device=device)


class AbsentHead(nn.Module):
    """Stands for the head: no logits, unless a hook replaces them.

    Attributes:
        num_logits: of the head.
    """

    def __init__(self, num_logits: int) -> None:
        super().__init__()
        self.num_logits = num_logits

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.new_empty((*hidden.shape[:-1], 0))


def _check(model: PreTrainedModel) -> None:
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or not isinstance(model.get_input_embeddings(), nn.Embedding):
        raise ConfigError(f"{_KEY}: a {type(model).__name__} has no embedding or no linear head to put on a stage")


def _absent_modules(
    model: PreTrainedModel, layers: Mapping[str, nn.Module], stage: Stage
) -> Iterator[tuple[str, nn.Module]]:
    """Yield the paths of the modules outside the layers that another stage has, and what stands for them."""
    entry, head = model.get_input_embeddings(), model.get_output_embeddings()
    dtype = next(entry.parameters()).dtype
    is_behind, outermost = False, ""
    for name, module in model.named_modules():
        if outermost and name.startswith(outermost):
            continue
        if any(name == layer or name.startswith(f"{layer}.") for layer in layers):
            is_behind = True
        elif not any(True for _ in module.parameters(recurse=False)):
            continue
        elif module is head:
            if not stage.is_last:
                yield name, AbsentHead(head.weight.shape[0])
        elif isinstance(module, nn.Embedding):
            if not stage.is_first:
                yield name, _NoEmbedding(module.embedding_dim, dtype, is_input=module is entry)
        elif is_behind and not stage.is_last:
            outermost = f"{name}."  # what is in it is absent with it
            yield name, _Passing()
