"""Checkpoints that other tools quantized, read as they are: which tensors make up a matrix, and how it is filled.

Only config dicts and tensors are known here, no files and no engine; codes and scales are rearranged, never changed.
"""

from collections.abc import Mapping
from typing import Any, Final

from zinfer.quantization.foreign.awq import Awq
from zinfer.quantization.foreign.compressed_tensors import CompressedTensors
from zinfer.quantization.foreign.contract import Scheme
from zinfer.quantization.foreign.gptq import Gptq
from zinfer.quantization.foreign.parts import Section

__all__ = ["Scheme", "find_scheme"]

_METHODS: Final = {
    "gptq": Gptq.from_config,
    "awq": Awq.from_config,
    "compressed-tensors": CompressedTensors.from_config,
}


def find_scheme(config: Mapping[str, Any]) -> Scheme | None:
    """The scheme that ``quantization_config`` of config.json describes, None without one.

    Raises:
        CheckpointError: something in it is not supported; names the key and its value, and says what to do.
    """
    section = Section("", config).section("quantization_config")
    if section is None:
        return None
    read = _METHODS.get(section.text("quant_method", ""))
    if read is None:
        raise section.unsupported("quant_method", f"weights are read from {', '.join(_METHODS)}")
    return read(section)
