"""What a bench is asked for."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zinfer.errors import ConfigError
from zinfer.jobs.request import WEIGHTS


@dataclass(frozen=True)
class BenchRequest:
    """The arguments of `run_bench`.

    Attributes:
        model: a folder with config.json, or a name in `KNOWN_MODELS`. Weights in the folder are not read.
        new_tokens: generated after each prompt, unless a row of ``input`` sets ``max_new_tokens``; end tokens and the
            row's other parameters do not end it.
        rows, prompt_len: random prompts, and the tokens of each.
        input: JSONL with the prompts instead.
        weights: a key of `WEIGHTS`; None: as config and config.json say.
        memory_cap: bytes of device memory to use at most; on a GPU the rest is held. None: all that is free.
        config: as for `LLM`.
        device: "auto", "cuda" or "cpu".
        experts: "uniform" or "zipf", see `zinfer.engine.routing`.
        kv_cache: form of the KV cache, "int8" or "fp8"; None: as config says.
        compare: rivals to run on the same prompts, with a real checkpoint of 16 bits (or config.json's dtype).
    """

    model: str
    new_tokens: int
    rows: int | None = None
    prompt_len: int = 512
    input: Path | None = None
    weights: str | None = None
    memory_cap: int | None = None
    config: Path | Mapping[str, object] | None = None
    device: str = "auto"
    experts: str = "uniform"
    compare: tuple[str, ...] = ()
    kv_cache: str | None = None

    def keys(self) -> dict[str, Any]:
        """Return the configuration's keys that the arguments state.

        Raises:
            ConfigError: there is no such ``weights``, or the number of rows is stated twice or not at all.
        """
        if self.rows is not None and self.input is not None:
            raise ConfigError("--rows and --input both set the number of rows; remove one of the two")
        if self.rows is None and self.input is None:
            raise ConfigError("--rows or --input is missing; give the number of random prompts, or a file of prompts")
        if self.weights is not None and self.weights not in WEIGHTS:
            raise ConfigError(f"--weights: expected one of {', '.join(WEIGHTS)}, got {self.weights!r}")
        # A GPU's free memory is what the cap leaves, and has to hold all; a CPU has no memory of its own to hold.
        on_cuda = self.device == "cuda" or (self.device == "auto" and torch.cuda.is_available())
        cap = {} if self.memory_cap is None or on_cuda else {"max_device_memory": self.memory_cap}
        cache = {} if self.kv_cache is None else {"kv_cache_dtype": self.kv_cache}
        return {"device": self.device, **(WEIGHTS[self.weights] if self.weights else {}), **cache, **cap}
