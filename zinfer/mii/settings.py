"""The keywords of `pipeline` and `serve`: MII's own, and what becomes of each."""

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from zinfer.config import resolve_settings
from zinfer.errors import ConfigError

_HERE: Final = ("model_name_or_path", "tokenizer", "max_length", "tensor_parallel", "config", "device")
_IDLE: Final = {
    "task": "only texts are generated",
    "torch_dist_port": "ranks choose a free port",
    "zmq_port_number": "ranks choose a free port",
    "load_with_sys_mem": "weights stream from host memory",
    "sync_debug": "of DeepSpeed's kernels",
    "profile_model_time": "zinfer.trace records passes",
    "skip_model_check": "of MII's list of models",
    "device_map": "each rank takes the GPU of its local number",
}
_REFUSED: Final = {
    "quantization_mode": "state {'zinfer': {'quantization': {'bits': 4}}} in config",
    "inference_engine_config": "state zinfer's keys in config",
    "trust_remote_code": "models with code of their own are not read",
}


@dataclass(frozen=True)
class ModelSettings:
    """What becomes of the keywords.

    Attributes:
        model: the checkpoint folder.
        config: for `zinfer.LLM` or `zinfer serve`, with ``tensor_parallel``.
        num_ranks: processes that divide each layer; of a server, those of each replica.
        tokenizer: of a pipeline; None: the folder's.
        max_length: by default of a pipeline's calls; None: MII's.
        device: None: the configuration's.
    """

    model: str
    config: dict[str, Any]
    num_ranks: int
    tokenizer: Any
    max_length: int | None
    device: str | None


def config_of(
    model: str, several: Mapping[str, Any] | None, given: Mapping[str, Any], *, default_ranks: int = 1
) -> ModelSettings:
    """Read MII's keywords.

    Args:
        model: as given first; "": stated among the keywords.
        several: keywords in a mapping.
        given: keywords of the call, which come first.
        default_ranks: of ``tensor_parallel``.

    Raises:
        ConfigError: names the keyword that cannot be used, and the nearest one.
    """
    words = {**(several or {}), **given}
    for name in words:
        if name in _REFUSED and words[name] not in (None, False, {}):
            raise ConfigError(f"{name} is not supported; {_REFUSED[name]}")
        if name not in (*_HERE, *_IDLE, *_REFUSED):
            near = difflib.get_close_matches(name, [*_HERE, *_IDLE], n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(_HERE)}"
            raise ConfigError(f"unknown keyword {name!r}; {hint}")
    model = model or words.get("model_name_or_path") or ""
    if not model:
        raise ConfigError("model_name_or_path is missing; give the folder of a checkpoint")
    stated = words.get("config") or {}
    config = dict(stated) if isinstance(stated, Mapping) else json.loads(Path(stated).read_text(encoding="utf-8"))
    num_ranks = words.get("tensor_parallel")
    if num_ranks is None:
        num_ranks = default_ranks
    if type(num_ranks) is not int or num_ranks < 1:
        raise ConfigError(f"tensor_parallel must be a whole number of at least 1, not {num_ranks!r:.60}")
    if num_ranks > 1:
        config = {**config, "tensor_parallel": {"tp_size": num_ranks}}
    resolve_settings(config, {}, swaps=True)
    device = words.get("device")
    return ModelSettings(str(model), config, num_ranks, words.get("tokenizer"), words.get("max_length"), device)
