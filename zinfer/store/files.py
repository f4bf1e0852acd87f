"""The files of a store: one safetensors file per block, and config, index and tokenizer files.

A block's file has its tensors in the slab's order, end to end, from a multiple of 4096 bytes on. The safetensors
library sorts tensors by name and width and aligns nothing; the format requires neither, and permits trailing spaces in
the header, which align the weights (huggingface/safetensors, README.md, "Format").
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import torch

from zinfer.checkpoint import Checkpoint
from zinfer.checkpoint.checkpoint import EXPLICIT_KEY, INDEX_NAME
from zinfer.checkpoint.fingerprint import text_files
from zinfer.checkpoint.header import DTYPES, LENGTH_BYTES
from zinfer.checkpoint.json_text import parse_object
from zinfer.model.partition import ModelBlock
from zinfer.nvme.aligned import ALIGNMENT_BYTES, align_up
from zinfer.offload.block import Block, SlabTensor
from zinfer.quantization.native.manifest import FORMAT_VERSION, METHOD
from zinfer.quantization.slab_matrix import SlabMatrix

_DTYPE_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class BlockFile:
    """The file of one block.

    Attributes:
        block: the block.
        file: the file's name.
        tensors: with full names and their offsets in the slab; in this order in the file.
    """

    block: Block
    file: str
    tensors: tuple[SlabTensor, ...]

    @classmethod
    def of(cls, block: ModelBlock, num_files: int) -> "BlockFile":
        """Make the file of a block; ``num_files`` is part of its name."""
        file = f"block-{block.block.index + 1:05}-of-{num_files:05}.safetensors"
        return cls(block.block, file, stored_tensors(block.block, name_prefix(block)))

    @cached_property
    def header(self) -> bytes:
        """The bytes before the weights, a multiple of 4096."""
        members: dict[str, object] = {"__metadata__": {"format": "pt"}}
        begin = 0
        for tensor in self.tensors:
            members[tensor.name] = {
                "dtype": _DTYPE_NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [begin, begin + tensor.nbytes],
            }
            begin += tensor.nbytes
        text = json.dumps(members, separators=(",", ":")).encode()
        text = text.ljust(align_up(LENGTH_BYTES + len(text), ALIGNMENT_BYTES) - LENGTH_BYTES)
        return len(text).to_bytes(LENGTH_BYTES, "little") + text

    @property
    def data_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def num_bytes(self) -> int:
        """Size of the whole file."""
        return len(self.header) + self.data_bytes

    def data(self, slab: memoryview) -> Iterator[memoryview]:
        """Yield the weights, tensor by tensor, from the block's slab."""
        for tensor in self.tensors:
            yield slab[tensor.offset : tensor.end]


def name_prefix(block: ModelBlock) -> str:
    """Return the prefix that names in a block's slab lack, so that the layers of a model have equal layouts."""
    return f"{block.block.name}." if block.is_layer else ""


def stored_tensors(block: Block, prefix: str = "") -> tuple[SlabTensor, ...]:
    """Return the tensors of a block's slab as stored in a file, where a quantized matrix is several tensors."""
    return tuple(
        SlabTensor(prefix + part.name, part.dtype, part.shape, part.offset)
        for tensor in block.layout.tensors
        for part in (tensor.parts() if isinstance(tensor, SlabMatrix) else [tensor])
    )


def sidecar_files(checkpoint: Checkpoint, dtype: torch.dtype, files: Sequence[BlockFile]) -> dict[str, bytes]:
    """Return the contents of config.json, the index and the tokenizer's files, by name.

    The config is the source's, except for keys about the storage of weights. It states the dtype explicitly; otherwise
    readers could take the codes' dtype for it, which is floating-point in some formats.

    Raises:
        OSError: the source cannot be read.
    """
    config = parse_object(checkpoint.config_path.read_bytes(), lenient=True)
    config = {key: value for key, value in config.items() if key not in ("torch_dtype", EXPLICIT_KEY)}
    config["dtype"] = str(dtype).removeprefix("torch.")
    config["quantization_config"] = {"quant_method": METHOD, "format_version": FORMAT_VERSION}
    places = {tensor.name: file.file for file in files for tensor in file.tensors}
    index = {"metadata": {"total_size": sum(file.data_bytes for file in files)}, "weight_map": places}
    made = {checkpoint.config_path.name: config, INDEX_NAME: index}
    texts = {name: (json.dumps(each, indent=2, sort_keys=True) + "\n").encode() for name, each in made.items()}
    folder = checkpoint.folder
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in text_files(folder)} | texts
