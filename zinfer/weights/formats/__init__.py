"""Reads checkpoints that other tools quantized: which tensors form a matrix, and how to fill it from them.

This package handles only config dicts and tensors, no files and no engine; it rearranges codes and scales, and never
changes them.
"""

from collections.abc import Mapping
from typing import Any, Final

from pydantic import ValidationError

from zinfer.errors import CheckpointError
from zinfer.weights.formats.awq import Awq
from zinfer.weights.formats.bitsandbytes import BitsAndBytes
from zinfer.weights.formats.compressed_tensors import CompressedTensors
from zinfer.weights.formats.fp4 import ModelOpt, Mxfp4
from zinfer.weights.formats.fp8 import FbgemmFp8, Fp8, Mxfp8
from zinfer.weights.formats.gptq import AutoRoundAwq, AutoRoundGptq, Gptq
from zinfer.weights.formats.scheme import PATH, REMEDY, ForeignScheme, Scheme, refusal

__all__ = ["Scheme", "find_scheme"]

_METHODS: Final[Mapping[str, type[ForeignScheme]]] = {
    "gptq": Gptq,
    "awq": Awq,
    "compressed-tensors": CompressedTensors,
    "fp8": Fp8,
    "fbgemm_fp8": FbgemmFp8,
    "mxfp4": Mxfp4,
    "mxfp8": Mxfp8,
    "modelopt": ModelOpt,
    "auto-round": AutoRoundGptq,
    "bitsandbytes": BitsAndBytes,
}


def find_scheme(config: Mapping[str, Any]) -> Scheme | None:
    """Return the scheme that ``quantization_config`` of config.json describes; None without one.

    Raises:
        CheckpointError: something in it is not supported; names the key and its value, and says what to do.
    """
    section = config.get(PATH)
    if section is None:
        return None
    if not isinstance(section, Mapping):
        raise CheckpointError(f"config.json: {PATH} is {section!r}: not an object; restore config.json")
    method = section.get("quant_method")
    scheme = _METHODS.get(str(method).lower())
    if scheme is None:
        what = f"quant_method is {method!r}: weights are read from {', '.join(_METHODS)}"
        raise CheckpointError(f"config.json: {PATH}.{what}; {REMEDY}")
    if scheme is AutoRoundGptq and "awq" in str(section.get("packing_format")):
        scheme = AutoRoundAwq
    try:
        return scheme.model_validate(dict(section))
    except ValidationError as error:
        raise refusal(error) from error
