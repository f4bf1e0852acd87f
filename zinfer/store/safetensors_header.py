"""What lies before the weights in a safetensors file.

The reference library sorts tensors by name and width and aligns nothing; the format leaves both open, and permits the
spaces at a header's end that make the alignment (huggingface/safetensors, README.md, "Format").
"""

import json
from collections.abc import Iterable
from typing import Final

from zinfer.checkpoint.header import DTYPES, LENGTH_BYTES
from zinfer.nvme.aligned import ALIGNMENT_BYTES, align_up
from zinfer.offload.block import SlabTensor

_DTYPE_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}


def head_of(tensors: Iterable[SlabTensor]) -> bytes:
    """All bytes before the weights, a multiple of 4096, where these tensors follow one another end to end."""
    members: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        offsets = [offset, offset + tensor.nbytes]
        members[tensor.name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": offsets,
        }
        offset = offsets[1]
    text = json.dumps(members, separators=(",", ":")).encode()
    text = text.ljust(align_up(LENGTH_BYTES + len(text), ALIGNMENT_BYTES) - LENGTH_BYTES)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text
