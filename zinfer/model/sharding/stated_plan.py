"""The plan of a configuration: `partition_config` and `preset_model` divide a family that has no plan of its own.

For a family with a plan they must say the same as it.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from torch import nn
from transformers import AutoConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from zinfer.config.parallel import TensorParallel
from zinfer.config.partition_specs import LayerSpec
from zinfer.errors import ConfigError
from zinfer.model.sharding import plans
from zinfer.model.sharding.cut import Shard
from zinfer.model.sharding.heads import heads_in, knows_heads
from zinfer.model.sharding.layout import ATTENTION, WHOLE, style_of

_SPECS: Final = "tensor_parallel.partition_config"
_PRESET: Final = "tensor_parallel.preset_model"
_LEAVE_OUT: Final = "leave the key out: the family's own plan then divides the layers"


def choose_plan(
    model: PreTrainedModel, shard: Shard, layers: Mapping[str, nn.Module], stated: TensorParallel
) -> plans.Plan:
    """Return how the layers of a model are divided.

    Raises:
        ConfigError: as `find_plan`; or what is stated contradicts the family's plan, or lacks a weight.
    """
    if stated.specs is None and stated.preset is None:
        return plans.find_plan(model, shard)
    config: Any = model.config.get_text_config()
    preset: plans.Plan = {} if stated.preset is None else _preset(stated.preset)
    specs = stated.specs.specs if stated.specs else ()
    uses_preset = stated.specs is None or stated.specs.uses_preset
    found: dict[str, str] = {}
    for name, layer in layers.items():
        for path, module, whole in _matrices(name, layer):
            spec = next((each for each in specs if each.matches(whole, config.model_type)), None)
            style = _style(spec, path, module, layer, config) if spec else None
            style = style or (style_of(preset, path) if uses_preset else None)
            if style is not None and found.setdefault(path, style) != style:
                raise ConfigError(f"{_SPECS}: {whole} is divided otherwise in other layers; state one way for all")
    key = _SPECS if specs else _PRESET
    if plans.is_divided(config.model_type):
        return _agreed(plans.find_plan(model, shard), found, key)
    for name, layer in layers.items():
        _check_whole(name, layer, found, key)
    return dict(sorted(found.items(), key=lambda item: -len(item[0])))


def _preset(name: str) -> plans.Plan:
    if not plans.is_divided(name):
        raise ConfigError(
            f"{_PRESET} = {name}: no family of that name has a plan; `zinfer families` lists those that do, or state "
            f"{_SPECS}"
        )
    return plans.plan_of(name, AutoConfig.for_model(name).get_text_config())


def _matrices(name: str, layer: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield path, module and parameter name of the linear layers within a layer."""
    for path, module in layer.named_modules():
        if isinstance(module, nn.Linear | Conv1D):
            yield path, module, f"{name}.{path}.weight"


def _style(spec: LayerSpec, path: str, module: nn.Module, layer: nn.Module, config: Any) -> str:
    if spec.kind == "skip":
        return plans.REPLICATED
    if spec.kind == "row":
        return plans.ROWWISE
    if spec.gathers:
        return plans.GATHERED
    if not spec.parts:
        return plans.COLWISE
    (weight,) = (each for leaf, each in module.named_parameters() if leaf == "weight")
    length = weight.shape[-1 if isinstance(module, Conv1D) else 0]
    sizes = tuple(size or length // len(spec.parts) for size in spec.parts)
    wanted: tuple[int, ...]
    if ATTENTION.search(path) is None:
        wanted, style = (length // 2,) * 2, plans.PACKED
    else:
        num_query, num_kv = heads_in(layer.get_submodule(path.rpartition(".")[0]), config)
        width = length // (num_query + 2 * num_kv)
        wanted, style = (num_query * width, num_kv * width, num_kv * width), plans.FUSED
    if sizes != wanted:
        raise ConfigError(
            f"{_SPECS}: {path} has {length} outputs, stated as parts of {', '.join(map(str, sizes))}, but by the "
            f"model's config they are {', '.join(map(str, wanted))}; correct shape"
        )
    return style


def _kind(style: str | None) -> str:
    if style in (None, plans.REPLICATED):
        return "skip"
    return "row" if style in (plans.ROWWISE, plans.SPLIT) else "column"


def _agreed(own: plans.Plan, stated: Mapping[str, str], key: str) -> plans.Plan:
    """Return a family's plan if what is stated says the same."""
    for path, style in stated.items():
        planned = style_of(own, path)
        if _kind(style) != _kind(planned):
            raise ConfigError(
                f"{key} divides {path} by {_kind(style)}, but the plan of the model's family says {_kind(planned)}; "
                f"{_LEAVE_OUT}"
            )
    if not stated:
        raise ConfigError(f"{key} matches no linear layer of the model; {_LEAVE_OUT}")
    return own


def _check_whole(name: str, layer: nn.Module, found: dict[str, str], key: str) -> None:
    """Complete a plan with what every rank holds whole, and refuse one that lacks a weight or does not know heads."""
    for path, module in layer.named_modules():
        if knows_heads(module) and ATTENTION.search(path) is None:
            raise ConfigError(
                f"{key}: {name}.{path} computes heads, but is not named as attention, by which heads are divided; "
                "leave tensor_parallel.tp_size out: the ranks then share the weights"
            )
    for path, _, whole in _matrices(name, layer):
        if path not in found:
            if WHOLE.search(f"{path}.weight") is None:
                raise ConfigError(f"{key} does not say how {whole} is divided; add a spec, of skip if not at all")
            found[path] = plans.REPLICATED
