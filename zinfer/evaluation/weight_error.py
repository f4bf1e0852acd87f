"""Measure the difference between a store's matrices and the original weights."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch

from zinfer.kernels.dequantize import dequantize_ref
from zinfer.kernels.quantized import QuantFormat, QuantizedMatrix
from zinfer.model.build import build_meta_model
from zinfer.model.matching import holds_transpose, match_weights
from zinfer.weights import Checkpoint, JoinedTensor, TensorEntry
from zinfer.weights.formats.gguf import EncodedTensor
from zinfer.weights.quantized import StoredMatrix, find_stored_scheme

_SLICE_ROWS: Final = 1024  # compared at a time, in float32


@dataclass(frozen=True)
class MatrixError:
    """One quantized parameter.

    Attributes:
        parameter: name of the parameter.
        layer: number of its layer; None outside the layers.
        format: format in the store.
        nbytes: size in the store.
        full_bytes: size of the original.
        relative_error: Frobenius norm of the difference over that of the weight.
    """

    parameter: str
    layer: int | None
    format: QuantFormat
    nbytes: int
    full_bytes: int
    relative_error: float


def measure_errors(source: Checkpoint, store: Checkpoint) -> Iterator[MatrixError]:
    """Compare each quantized matrix of the store with the source's weight.

    Skips matrices of which the store holds the source's codes; others are compared with what these stand for.

    Raises:
        CheckpointError: one of the two cannot be read.
    """
    model = build_meta_model(source)
    full = match_weights(model, source, find_stored_scheme(source))
    stored = match_weights(model, store, find_stored_scheme(store))
    for name, matrix in stored.items():
        weight = full[name]
        if not isinstance(matrix, StoredMatrix):
            continue
        if isinstance(weight, TensorEntry | JoinedTensor | EncodedTensor):
            transposed = holds_transpose(model.get_submodule(name.rpartition(".")[0]), len(weight.shape))
            values = torch.cat([piece.read().flatten() for piece in weight.pieces]).view(weight.shape)
            values = (values.transpose(-1, -2) if transposed else values).reshape(matrix.rows, matrix.columns)
            yield _compare(name, values, weight.nbytes, matrix)
        elif isinstance(weight, StoredMatrix) and weight.encoding.is_native and weight.format != matrix.format:
            entries = {part: piece for part, entry in weight.parts for piece in entry.pieces}
            parts = {part: entry.read() for part, entry in entries.items()}
            values = torch.cat([dequantize_ref(each) for each in weight.read(parts, torch.float32)])
            yield _compare(name, values, sum(entry.nbytes for entry in entries.values()), matrix)


def _compare(name: str, values: torch.Tensor, full_bytes: int, stored: StoredMatrix) -> MatrixError:
    parts = {part: piece for part, entry in stored.parts for piece in entry.pieces}
    tensors = {part: entry.read() for part, entry in parts.items()}
    matrix = QuantizedMatrix(stored.format, stored.columns, tensors["scales"].dtype, **tensors)
    squares = torch.zeros(2, dtype=torch.float64)
    for rows in matrix.slices(_SLICE_ROWS * stored.columns):
        own = values[rows].float()
        difference = dequantize_ref(matrix.part(rows), torch.float32) - own
        squares += torch.stack([difference.double().square().sum(), own.double().square().sum()])
    layer = re.search(r"\.(\d+)\.", name)
    return MatrixError(
        parameter=name,
        layer=int(layer[1]) if layer else None,
        format=stored.format,
        nbytes=sum(entry.nbytes for entry in parts.values()),
        full_bytes=full_bytes,
        relative_error=float((squares[0] / squares[1]).sqrt()) if squares[1] else 0.0,
    )
