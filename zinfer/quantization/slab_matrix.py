"""A quantized matrix as one tensor of a slab: its codes, scales and so on side by side, each aligned to 256 bytes."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch

from zinfer.kernels.quantized import QuantFormat, QuantizedMatrix
from zinfer.nvme.aligned import align_up
from zinfer.offload.block import SLAB_ALIGNMENT_BYTES, Block, SlabTensor
from zinfer.quantization.parameter import QuantizedParameter


def most_dequantized_bytes(blocks: Iterable[Block]) -> int:
    """Of the largest quantized matrix in full; 0 if there is none."""
    matrices = (tensor for block in blocks for tensor in block.layout.tensors if isinstance(tensor, SlabMatrix))
    return max((matrix.numel * matrix.dtype.itemsize for matrix in matrices), default=0)


@dataclass(frozen=True)
class SlabMatrix(SlabTensor):
    """Where a quantized parameter lies; ``dtype`` and ``shape`` are those that its module sees.

    Args:
        transposed: the module holds the matrix's transpose, [columns, rows].
        quantizes_input: products quantize what they are multiplied with, too.
    """

    format: QuantFormat = field(kw_only=True)
    transposed: bool = field(default=False, kw_only=True)
    quantizes_input: bool = field(default=False, kw_only=True)

    @property
    def rows(self) -> int:
        return self.shape[-1] if self.transposed else self.numel // max(self.shape[-1], 1)

    @property
    def columns(self) -> int:
        return self.shape[0] if self.transposed else self.shape[-1]

    @property
    def nbytes(self) -> int:
        return sum(align_up(part.nbytes, SLAB_ALIGNMENT_BYTES) for part in self.parts())

    @property
    def arranged(self) -> "SlabMatrix":
        """With codes and scales in the order that products take; of several matrices each is multiplied with alone."""
        rows = self.rows if self.transposed else self.shape[-2]
        return replace(self, format=self.format.arranged(rows, self.columns))

    def matrix(self, slab: torch.Tensor) -> QuantizedMatrix:
        """The matrix over the slab's bytes (uint8), sharing their memory."""
        views = {part.name.removeprefix(f"{self.name}."): part.view(slab) for part in self.parts()}
        return QuantizedMatrix(self.format, self.columns, **views)

    def parameter(self, slab: torch.Tensor) -> QuantizedParameter:
        return QuantizedParameter.make(
            self.matrix(slab), self.shape, transposed=self.transposed, quantizes_input=self.quantizes_input
        )

    def parts(self) -> list[SlabTensor]:
        """The tensors that the matrix consists of, one behind the other."""
        parts: list[SlabTensor] = []
        offset = self.offset
        for name, shape in self.format.part_shapes(self.rows, self.columns).items():
            dtype = self.format.part_dtype(name, self.dtype)
            parts.append(SlabTensor(f"{self.name}.{name}", dtype, shape, offset))
            offset = align_up(parts[-1].end, SLAB_ALIGNMENT_BYTES)
        return parts
