"""`Sharding`: what one rank holds of a model, and the sums and joins that its modules need."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import lcm
from typing import Any, Final

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from zinfer.config.parallel import TensorParallel
from zinfer.config.values import BlockClass
from zinfer.errors import ConfigError
from zinfer.model.matching import Weight, holds_transpose
from zinfer.model.partition import find_layers
from zinfer.model.sharding.cut import Cut, Shard
from zinfer.model.sharding.grain import Grain
from zinfer.model.sharding.layout import LayerCuts, LayerDivider
from zinfer.model.sharding.matrices import cut_matrix
from zinfer.model.sharding.plans import EVERYTHING_ELSE, Plan
from zinfer.model.sharding.stated_plan import choose_plan
from zinfer.model.sharding.weights import CutTensor
from zinfer.weights import JoinedTensor, TensorEntry
from zinfer.weights.quantized import StoredMatrix

_ANY: Final = Grain()
_NOTHING: Final = TensorParallel()
_MLP_WIDTHS: Final = ("intermediate_size", "moe_intermediate_size", "ffn_dim", "n_inner", "d_ff", "ffn_hidden_size")


@dataclass
class Sharding:
    """How one rank's part of a model is made, found without reading weights.

    Attributes:
        shard: the rank's place.
        cuts: the parameters of which it has ranges, by all their names.
        embeddings: embeddings divided by vocabulary, with the number of all tokens.
        heads: linear layers whose outputs are logits, divided likewise.
        token_unit: tokens that stay together, because the head's codes do.
        layers: what becomes of the layers' modules.
        grain: what stayed together.
    """

    shard: Shard
    cuts: dict[str, Cut]
    embeddings: dict[str, int]
    heads: dict[str, int]
    token_unit: int
    layers: LayerCuts
    grain: Grain
    _forms: dict[str, tuple[tuple[int, ...], bool]]
    _undone: list[tuple[Any, str, object]] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        shard: Shard,
        classes: Sequence[BlockClass] = (),
        grain: Grain = _ANY,
        stated: TensorParallel = _NOTHING,
    ) -> "Sharding":
        """Find how a model is divided.

        Args:
            classes: of modules that are layers too; their named linear layers must be those that the plan sums.
            grain: what stays together: cuts are moved to where groups and words of codes end.
            stated: the plan of the configuration, for a family without one.

        Raises:
            ConfigError: the model cannot be divided so; names the key, the weight or the numbers.
        """
        layers = find_layers(model, classes)
        plan = choose_plan(model, shard, layers, stated)
        config: Any = model.config.get_text_config()
        found = LayerCuts()
        divider = LayerDivider(plan, shard, config, grain)
        for name, layer in layers.items():
            divider.divide(name, layer, found)
        _check_policy(layers, classes, found)
        vocabulary = _vocabulary_names(model)
        cuts = dict(found.cuts)
        embeddings, heads = dict[str, int](), dict[str, int]()
        token_unit = lcm(*(grain.units[name].rows for name in vocabulary & grain.units.keys()))
        for name in sorted(vocabulary):
            path, _, _ = name.rpartition(".")
            module, count = model.get_submodule(path), model.get_parameter(name).shape[0]
            cuts[name] = Cut(0, (shard.padded_bounds(count, token_unit),))
            if isinstance(module, nn.Embedding):
                embeddings[path] = count
            elif isinstance(module, nn.Linear):
                heads[path] = count
        several = next(iter(found.heads.values()), None)
        if several is not None:
            found.changes += several.config_changes(config)
            found.changes.append((config, "head_dim", _head_dim(config, several.num_query)))
        found.changes += _width_changes(config, shard, divider, plan)
        return cls(shard, cuts, embeddings, heads, token_unit, found, grain, _forms(model, cuts))

    def cut_weights(self, weights: Mapping[str, Weight]) -> dict[str, Weight]:
        """Return the places of the rank's weights in a checkpoint, from those of all.

        Raises:
            ConfigError: the checkpoint holds a weight quantized, and codes there share scales or words across a cut.
        """
        made: dict[str, Weight] = {}
        cut_before: dict[tuple[int, Cut], StoredMatrix] = {}  # tied weights share their bytes
        for name, weight in weights.items():
            if name in self.layers.dropped:
                continue
            cut = self.cuts.get(name)
            if cut is None:
                made[name] = weight
            elif isinstance(weight, TensorEntry | JoinedTensor):
                made[name] = CutTensor(weight, cut)
            elif isinstance(weight, StoredMatrix):
                if (id(weight), cut) not in cut_before:
                    shape, transposed = self._forms[name]
                    cut_before[id(weight), cut] = cut_matrix(weight, cut, shape, transposed=transposed)
                made[name] = cut_before[id(weight), cut]
            else:
                raise ConfigError(
                    f"tensor_parallel.tp_size: {weight.file} holds {name} in GGUF's blocks, which ranks do not divide "
                    "yet; leave the key out: the ranks then share the weights; or divide a store that `zinfer "
                    "quantize` makes of it"
                )
        return made

    def apply(self, model: nn.Module) -> None:
        """Give the modules the rank's shapes and, where weights are in memory, its values; call once."""
        made: dict[int, nn.Parameter] = {}
        for name, parameter in list(model.named_parameters(remove_duplicate=False)):
            if name in self.layers.dropped:
                self._drop_bias(model, name)
            elif name in self.cuts:
                if id(parameter) not in made:
                    made[id(parameter)] = nn.Parameter(self.cuts[name].of(parameter.detach()), requires_grad=False)
                self._replace(model, name, made[id(parameter)])
        for target, name, value in self.layers.changes:
            self._set(target, name, value)

    def undo(self) -> None:
        """Give attributes and configs their former values; parameters are left. Idempotent."""
        while self._undone:
            target, name, former = self._undone.pop()
            if name == "__class__":
                target.__class__ = former
            elif former is _ABSENT:
                target.__dict__.pop(name, None)
            else:
                setattr(target, name, former)

    def _replace(self, model: nn.Module, name: str, parameter: nn.Parameter) -> None:
        path, _, leaf = name.rpartition(".")
        module: Any = model.get_submodule(path)
        module._parameters[leaf] = parameter
        if leaf != "weight":
            return
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = parameter.shape
        elif isinstance(module, Conv1D):
            module.nx, module.nf = parameter.shape
        elif isinstance(module, nn.Embedding):
            module.num_embeddings, module.embedding_dim = parameter.shape
            module.padding_idx = None  # torch checks that it is in the range; it matters in training alone

    def _drop_bias(self, model: nn.Module, name: str) -> None:
        """Take a bias from a rank that does not add it: None in a linear layer, zeros where experts index it."""
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        parameter = module._parameters[leaf]
        assert parameter is not None
        if isinstance(module, nn.Linear | Conv1D):
            module._parameters[leaf] = None
            return
        cut = self.cuts.get(name)
        shape = cut.shape(tuple(parameter.shape)) if cut else parameter.shape
        del module._parameters[leaf]
        module.register_buffer(leaf, torch.zeros(shape, dtype=parameter.dtype), persistent=False)

    def _set(self, target: Any, name: str, value: object) -> None:
        if isinstance(getattr(type(target), name, None), property):  # Falcon's config computes the width of a head
            own = type(target)
            self._undone.append((target, "__class__", own))
            target.__class__ = type(own.__name__, (own,), {"__module__": own.__module__, name: value})
            return
        self._undone.append((target, name, getattr(target, name, _ABSENT)))
        setattr(target, name, value)


_ABSENT: Final = object()


def _vocabulary_names(model: PreTrainedModel) -> set[str]:
    """Return the names of the parameters with a row for each token: of embeddings, and of the head of logits."""
    try:
        ends: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
    except NotImplementedError:  # a model of two kinds of inputs has no one embedding; all ranks hold them whole
        return set()
    modules = [end for end in ends if isinstance(end, nn.Embedding | nn.Linear)]  # not what embeds pictures
    held = {id(each) for module in modules for each in module.parameters(recurse=False)}
    named = dict(model.named_parameters(remove_duplicate=False))
    names = {name for name, parameter in named.items() if id(parameter) in held}
    ties = [(target, source) for target, source in model.all_tied_weights_keys.items() if {target, source} <= {*named}]
    known = -1
    while len(names) != known:
        known = len(names)
        for pair in ties:
            if names & {*pair}:
                names |= {*pair}
    return names


def _check_policy(layers: Mapping[str, nn.Module], classes: Iterable[BlockClass], found: LayerCuts) -> None:
    """Refuse an injection policy whose sums are not the plan's."""
    for each in classes:
        for name, layer in layers.items():
            own = {path for path in found.sums if path.startswith(f"{name}.")}
            stated = {path for path in own if any(path.endswith(linear) for linear in each.linears)}
            if each.is_class_of(layer) and each.linears and stated != own:
                raise ConfigError(
                    f"injection_policy.{each.name} must name the linear layers whose outputs are summed over ranks, "
                    f"all of them; it leaves out {', '.join(sorted(own - stated))}"
                )


def _head_dim(config: Any, num_heads: int) -> int:
    stated = getattr(config, "head_dim", None)
    return int(stated or config.hidden_size // num_heads)


def _forms(model: nn.Module, names: Iterable[str]) -> dict[str, tuple[tuple[int, ...], bool]]:
    """Return the shapes of parameters, and whether they are transposed matrices."""
    held = {name: (model.get_submodule(name.rpartition(".")[0]), model.get_parameter(name).shape) for name in names}
    return {name: (tuple(shape), holds_transpose(own, len(shape))) for name, (own, shape) in held.items()}


def _width_changes(
    config: PretrainedConfig, shard: Shard, divider: LayerDivider, plan: Plan
) -> list[tuple[Any, str, object]]:
    """Return the widths of feed-forwards that memory is planned by, never less than a rank's."""
    found: list[tuple[Any, str, object]] = []
    if EVERYTHING_ELSE in plan:
        return found
    of_experts = "moe_intermediate_size" if hasattr(config, "moe_intermediate_size") else "intermediate_size"
    for name in _MLP_WIDTHS:
        own, value = shard.within if name == of_experts else shard, getattr(config, name, None)
        if isinstance(value, int):
            unit = divider.most_stored if value % divider.most_unit else divider.most_unit
            found.append((config, name, own.padded_size(value, unit)))
    return found
