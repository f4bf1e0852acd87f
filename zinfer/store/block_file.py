"""A block as a safetensors file: its tensors in the slab's order, end to end, from a multiple of 4096 bytes on."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from zinfer.model.partition import ModelBlock
from zinfer.offload.block import Block, SlabTensor
from zinfer.quantization.slab_matrix import SlabMatrix
from zinfer.store.safetensors_header import head_of


@dataclass(frozen=True)
class BlockFile:
    """Where the bytes of a block's slab go.

    Attributes:
        block: as it is cut.
        file: the name.
        tensors: by their full names, at their places in the slab; neighbours in the file in this order.
    """

    block: Block
    file: str
    tensors: tuple[SlabTensor, ...]

    @classmethod
    def of(cls, block: ModelBlock, num_files: int) -> "BlockFile":
        """The file of a block, one of so many."""
        prefix = name_prefix(block)
        file = f"block-{block.block.index + 1:05}-of-{num_files:05}.safetensors"
        return cls(block.block, file, tuple(_tensors(block.block, prefix)))

    @cached_property
    def header(self) -> bytes:
        """All bytes before the weights."""
        return head_of(self.tensors)

    @property
    def data_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def num_bytes(self) -> int:
        """Size of the whole file."""
        return len(self.header) + self.data_bytes

    def data(self, slab: memoryview) -> Iterator[memoryview]:
        """The weights, piece by piece, out of the block's slab."""
        for tensor in self.tensors:
            yield slab[tensor.offset : tensor.end]


def name_prefix(block: ModelBlock) -> str:
    """What the names in a block's slab lack of the model's: the layers of a model have equal slabs."""
    return f"{block.block.name}." if block.is_layer else ""


def _tensors(block: Block, prefix: str) -> Iterator[SlabTensor]:
    for tensor in block.layout.tensors:
        for part in tensor.parts() if isinstance(tensor, SlabMatrix) else [tensor]:
            yield SlabTensor(prefix + part.name, part.dtype, part.shape, part.offset)
