"""A parameter that a checkpoint holds in several tensors, one behind the other: experts, or matrices joined later."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from zinfer.checkpoint.header import TensorEntry


@dataclass(frozen=True)
class JoinedTensor:
    """Row-major tensors whose bytes, one behind the other, are those of one tensor of ``shape``."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[TensorEntry, ...]

    @classmethod
    def of(cls, name: str, shape: tuple[int, ...], pieces: Sequence[TensorEntry]) -> "JoinedTensor | None":
        """None where the pieces do not make up the shape: rows of another width, other numbers of them, two dtypes."""
        fits = all(
            piece.shape[1:] == shape[1:] or (len(piece.shape) in (1, 2) and piece.shape[-1:] == shape[-1:])
            for piece in pieces
        )
        numel = sum(prod(piece.shape) for piece in pieces)
        if not fits or numel != prod(shape) or len({piece.dtype for piece in pieces}) != 1:
            return None
        return cls(name, shape, tuple(pieces))

    @property
    def dtype(self) -> torch.dtype:
        return self.pieces[0].dtype

    @property
    def file(self) -> Path:
        """Of the first piece."""
        return self.pieces[0].file

    @property
    def offset(self) -> int:
        """Of the first piece in its file."""
        return self.pieces[0].offset

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)
