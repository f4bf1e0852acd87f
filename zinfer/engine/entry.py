"""DeepSpeed's two functions that make an engine: `init_inference`, and `initialize` of ZeRO-Inference."""

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from torch import nn

from zinfer.config import Ignored, resolve_settings
from zinfer.config.settings import say_without_effect
from zinfer.engine.engine import InferenceEngine
from zinfer.errors import ConfigError
from zinfer.weights.hub import ensure_downloaded

# Arguments of DeepSpeed's `initialize` that ask for training, and those that only configure it.
_TRAINING: Final = ("optimizer", "lr_scheduler", "training_data")
_IDLE: Final = {
    "model_parameters": "says what an optimizer changes; nothing is trained here",
    "collate_fn": "makes training batches; nothing is trained here",
    "dist_init_required": "says how several GPUs find each other; zinfer has its own way",
    "distributed_port": "says how several GPUs find each other; zinfer has its own way",
}


def init_inference(
    model: str | os.PathLike[str] | nn.Module,
    config: str | os.PathLike[str] | Mapping[str, object] | None = None,
    **kwargs: object,
) -> InferenceEngine:
    """Make an engine that runs ``model`` within the memory budgets.

    Args:
        model: a checkpoint folder, a Hugging Face cache folder, a name on the hub (``org/name`` or
            ``org/name@revision``; downloaded unless it is in the cache), or a transformers module: one with its weights
            in memory (they are moved out, block by block), or one on the meta device
            together with ``checkpoint=``, a folder or a list of files. Other torch modules work too: their blocks are
            the modules of one class that repeat in a list, or those whose class ``injection_policy=`` names.
        config: DeepSpeed-style settings: a dict, or the path of a JSON file. Never changed. Keys without effect are
            logged.
        kwargs: the same keys; a key with two different values is an error.

    Raises:
        ConfigError: a key or value cannot be used.
        CheckpointError: the checkpoint is incomplete, damaged, or not a model that can be built.
        PlanError: a memory budget is too small.
        OSError: weights could not be read, or not written under ``nvme_path``.
    """
    settings = resolve_settings(config, kwargs, is_module=isinstance(model, nn.Module))
    say_without_effect(settings)
    ensure_downloaded(model, download=settings.download)
    return InferenceEngine(model, replace(settings, is_whole=True))


def initialize(
    args: object = None,
    model: str | os.PathLike[str] | nn.Module | None = None,
    *,
    config: str | os.PathLike[str] | Mapping[str, object] | None = None,
    config_params: str | os.PathLike[str] | Mapping[str, object] | None = None,
    **kwargs: object,
) -> tuple[InferenceEngine, None, None, None]:
    """Make an engine as DeepSpeed's `initialize` does for ZeRO-Inference; optimizer, loader and scheduler are None.

    Args:
        args: parsed command line; its `deepspeed_config` is the configuration if none is given here.
        model: as for `init_inference`.
        config: likewise; `train_batch_size` is not needed.
        config_params: an older name of ``config``.
        kwargs: DeepSpeed's other arguments, and keys of the configuration. ``optimizer``, ``lr_scheduler`` and
            ``training_data`` are refused; those that only configure training are listed in
            `engine.settings.without_effect`.

    Raises:
        ConfigError, CheckpointError, PlanError: as `init_inference`.
    """
    if model is None:
        raise ConfigError("initialize: model is missing; give a module or a folder")
    for name in _TRAINING:
        if kwargs.pop(name, None) is not None:
            raise ConfigError(f"initialize: {name} asks for training, and nothing is trained here; leave it out")
    idle = tuple(Ignored(name, reason) for name, reason in _IDLE.items() if kwargs.pop(name, None) is not None)
    settings = resolve_settings(
        _one_config(args, config, config_params), kwargs, is_module=isinstance(model, nn.Module)
    )
    settings = replace(settings, without_effect=settings.without_effect + idle, is_whole=True)
    say_without_effect(settings)
    ensure_downloaded(model, download=settings.download)
    return InferenceEngine(model, settings), None, None, None


def _one_config(args: object, *stated: Any) -> Any:
    """Return the configuration, from the one argument that holds it."""
    places = (getattr(args, "deepspeed_config", None), *stated)
    given = [place for place in places if place is not None]
    if len(given) > 1:
        raise ConfigError(
            "initialize: the configuration is given twice, among config, config_params and args.deepspeed_config; "
            "keep one of them"
        )
    return next(iter(given), None)
