"""The names of deepspeed.ops.transformer.inference: a configuration as an object, and the layers with fused kernels."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from typing import Any, Final, Self

from torch import nn

from zinfer.config import resolve_settings
from zinfer.config.key import Status
from zinfer.config.keys import KEYS
from zinfer.config.quantization_rules import QuantizationConfig, QuantizationType
from zinfer.config.source import config_keys
from zinfer.errors import ConfigError
from zinfer.inject.injection import has_fused_kernels
from zinfer.model.families import FAMILIES
from zinfer.model.quantize import quantize_transformer

__all__ = [
    "Config",
    "DeepSpeedConfigError",
    "DeepSpeedInferenceConfig",
    "DeepSpeedTransformerInference",
    "QuantizationConfig",
    "QuantizationType",
    "add_config_arguments",
    "default_inference_config",
    "quantize_transformer",
]

_OTHER_SECTIONS: Final = ("zinfer", "zero_optimization", "aio", "fp16", "bf16")


class Config(dict[str, Any]):
    """A configuration for `zinfer.init_inference`, checked when it is made; its keys are attributes too.

    Keys that describe the model, such as ``hidden_size`` and ``heads``, have no effect: the model states them itself.
    `engine.settings.without_effect` lists them.

    Raises:
        ConfigError: an unknown key, or a value that cannot be used.
    """

    def __init__(self, config: Mapping[str, object] | None = None, **keys: object) -> None:
        resolve_settings(config, keys)
        super().__init__({**(config or {}), **keys})

    @classmethod
    def from_dict(cls, json_object: Mapping[str, object]) -> Self:
        """Return the configuration of a mapping."""
        return cls(json_object)

    @classmethod
    def from_json_file(cls, json_file: str | os.PathLike[str]) -> Self:
        """Return the configuration of a JSON file."""
        return cls(config_keys(os.fspath(json_file)))

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the configuration does not state {name!r}") from None

    def __setattr__(self, name: str, value: object) -> None:
        resolve_settings({**self, name: value})
        self[name] = value


DeepSpeedInferenceConfig = Config
DeepSpeedConfigError = ConfigError


def default_inference_config() -> dict[str, Any]:
    """Return DeepSpeed's inference keys with the values that they have if they are not given; None: it depends."""
    found: dict[str, Any] = {}
    for key in KEYS:
        if key.status is Status.SUPPORTED and key.parse is not None and key.same_as is None:
            *sections, name = key.path.split(".")
            if not sections or sections[0] not in _OTHER_SECTIONS:
                place = found
                for section in sections:
                    place = place.setdefault(section, {})
                is_request = sections[:1] == ["quant"]  # any value there asks for quantized weights
                place[name] = None if is_request or key.default == () else key.default
    return found


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add DeepSpeed's command-line arguments to a parser, and return it; `initialize` reads ``--deepspeed_config``."""
    group = parser.add_argument_group("DeepSpeed")
    group.add_argument("--deepspeed", action="store_true", help="for the script's own use; no effect by itself")
    group.add_argument("--deepspeed_config", metavar="FILE", help="the configuration, a JSON file")
    return parser


class _ByKernels(type):
    """Makes `isinstance` ask whether a module computes with fused kernels."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, nn.Module) and has_fused_kernels(instance)


class DeepSpeedTransformerInference(metaclass=_ByKernels):
    """A layer is an instance while it computes with fused kernels, by `replace_with_kernel_inject`.

    DeepSpeed replaces layers by modules of this class. Here the model's own modules stay, with other forwards.

    Attributes:
        supported_models: the families with fused kernels, as `zinfer families` names them.
    """

    supported_models: Final = tuple(family.name for family in FAMILIES if family.fused)

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise TypeError(
            "layers are not made one by one here; init_inference(model, replace_with_kernel_inject=True) gives the "
            "layers of a model fused kernels, and `engine.injected` lists them"
        )
