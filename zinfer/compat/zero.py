"""`zinfer.zero`: the part of deepspeed.zero that inference scripts use."""

import os
from collections.abc import Mapping

import torch
from torch import nn

from zinfer.compat.missing import sentence_for
from zinfer.config import resolve_settings
from zinfer.errors import ConfigError
from zinfer.model.build import OnDevice

__all__ = ["Init"]


class Init(OnDevice):
    """Context manager for `deepspeed.zero.Init`: modules are built in host memory, for an engine to place.

    DeepSpeed divides each parameter among the processes as the module is built. Here the engine places the weights,
    and each process builds the whole module; one on the meta device with ``checkpoint=``, or a folder, needs no memory.

    Args:
        module: a module that is built already; cast to the dtype.
        config_dict_or_path, config: the configuration; its fp16 or bf16 section, or ``dtype``, is the dtype.
        enabled: False: do nothing.
        dtype: of floating-point parameters; the configuration's, or torch's default dtype, if not given.
        kwargs: DeepSpeed's other arguments; without effect.

    Raises:
        ConfigError: the configuration cannot be read, both names of it are given, or the dtypes differ.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        *,
        config_dict_or_path: str | os.PathLike[str] | Mapping[str, object] | None = None,
        config: str | os.PathLike[str] | Mapping[str, object] | None = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        **kwargs: object,
    ) -> None:
        for name in kwargs:
            if name not in _WITHOUT_EFFECT:
                raise ConfigError(f"zero.Init: unknown argument {name!r}; known are {', '.join(_WITHOUT_EFFECT)}")
        if config is not None and config_dict_or_path is not None:
            raise ConfigError("zero.Init: config and config_dict_or_path are the same; keep one of them")
        stated = resolve_settings(config or config_dict_or_path, {"dtype": dtype}).dtype
        super().__init__(stated or torch.get_default_dtype(), "cpu", enabled)
        if module is not None and enabled and stated is not None:
            module.to(stated)


_WITHOUT_EFFECT = (
    *("data_parallel_group", "mem_efficient_linear", "mpu", "param_swapper", "pin_memory", "remote_device"),
    *("sequence_data_parallel_group", "zero_param_parallel_group", "zero_quantized_nontrainable_weights"),
    "zero_quantized_weights",
)


def __getattr__(name: str) -> object:
    raise AttributeError(sentence_for(f"zero.{name}") or f"zinfer.zero has no {name!r}; Init is all it has")
