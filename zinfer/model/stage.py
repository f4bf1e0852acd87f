"""`StageModel`: a module tree with one stage's part of the layers, for pipeline parallelism.

Layers of other stages leave the module, as `ShorterModel` describes.

Embeddings are on the first stage, the head and what follows the layers in the tree on the last; elsewhere modules
without weights stand for them. Their outputs are not used: the stage's first layer gets the hidden states of the stage
before. Other modules in front of the layers, such as OPT's projections, are small and stay on every stage.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch
from torch import nn
from transformers import PreTrainedModel

from zinfer.config.values import BlockClass
from zinfer.errors import ConfigError
from zinfer.model.batching_support import check_family
from zinfer.model.layers import find_layers
from zinfer.model.shorter_model import ShorterModel

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
    try:
        check_family(model)
    except ConfigError as error:
        raise ConfigError(f"{_KEY}: stages need a model that runs in ragged batches: {error}") from error
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or not isinstance(model.get_input_embeddings(), nn.Embedding):
        raise ConfigError(f"{_KEY}: a {type(model).__name__} has no embedding or no linear head to put on a stage")


def _absent_modules(
    model: PreTrainedModel, layers: Mapping[str, nn.Module], stage: Stage
) -> Iterator[tuple[str, nn.Module]]:
    """Yield the paths of the modules outside the layers that another stage has, and what stands for them."""
    entry, head = model.get_input_embeddings(), model.get_output_embeddings()
    dtype = next(entry.parameters()).dtype
    is_behind = False
    for name, module in model.named_modules():
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
            yield name, _Passing()
