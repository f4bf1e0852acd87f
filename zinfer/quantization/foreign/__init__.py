"""Checkpoints that other tools quantized, read as they are: which tensors make up a matrix, and how it is filled.

Only config dicts and tensors are known here, no files and no engine; codes and scales are rearranged, never changed.
"""

from zinfer.quantization.foreign.contract import Scheme
from zinfer.quantization.foreign.scheme import find_scheme

__all__ = ["Scheme", "find_scheme"]
