"""A rank's part of a parameter in a checkpoint."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from zinfer.model.sharding.cut import Cut
from zinfer.offload.block import Extent, SlabTensor
from zinfer.weights import JoinedTensor, TensorEntry


@dataclass(frozen=True)
class CutTensor:
    """The ranges of a stored tensor that one rank reads. Equal ones share their bytes in a slab."""

    whole: TensorEntry | JoinedTensor
    cut: Cut

    @property
    def name(self) -> str:
        return self.whole.name

    @property
    def dtype(self) -> torch.dtype:
        return self.whole.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.cut.shape(self.whole.shape)

    @property
    def file(self) -> Path:
        """The file of the first piece."""
        return self.whole.file

    @property
    def offset(self) -> int:
        return self.whole.offset

    @property
    def pieces(self) -> tuple[TensorEntry, ...]:
        """The stored tensors that it is cut from."""
        return self.whole.pieces

    def extents(self, tensor: SlabTensor) -> Iterator[Extent]:
        """Yield the bytes that fill a slab's tensor."""
        begin = 0
        for piece in self.pieces:
            end = begin + prod(piece.shape)
            size, slab_size = piece.dtype.itemsize, tensor.dtype.itemsize
            for runs in self.cut.runs(self.whole.shape, begin, end):
                several = runs.count > 1
                yield Extent(
                    piece.file,
                    piece.offset + runs.begin * size,
                    runs.count * runs.numel * size,
                    piece.dtype,
                    tensor.offset + runs.place * slab_size,
                    tensor.dtype,
                    rows=runs.count,
                    pitch=runs.pitch * size if several else 0,
                    slab_pitch=runs.place_pitch * slab_size if several else 0,
                )
            begin = end
