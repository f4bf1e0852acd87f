"""A quantized parameter as a checkpoint holds it: several tensors that a scheme makes one matrix of."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from zinfer.checkpoint import Checkpoint, TensorEntry
from zinfer.checkpoint.json_text import parse_object
from zinfer.errors import CheckpointError
from zinfer.kernels.quantized import QuantFormat, QuantizedMatrix
from zinfer.quantization.foreign import Scheme, find_scheme
from zinfer.store.manifest import METHOD
from zinfer.store.scheme import StoreScheme


def find_stored_scheme(checkpoint: Checkpoint) -> Scheme | None:
    """How the checkpoint stores quantized weights, None if it holds them in full; a list of files does not say how.

    Raises:
        CheckpointError: in a way that is not supported.
    """
    if checkpoint.is_listed:
        return None
    config = parse_object(checkpoint.config_path.read_bytes(), lenient=True)
    section = config.get("quantization_config")
    if isinstance(section, dict) and section.get("quant_method") == METHOD:
        return StoreScheme.open(checkpoint.folder)
    return find_scheme(config)


@dataclass(frozen=True, eq=False)
class StoredMatrix:
    """The parts of one parameter.

    Attributes:
        parameter: its name in the checkpoint.
        scheme: what the parts mean.
        parts: the tensors by the scheme's names for them.
        format, rows, columns: the matrix that comes out.
    """

    parameter: str
    scheme: Scheme
    parts: tuple[tuple[str, TensorEntry], ...]
    format: QuantFormat
    rows: int
    columns: int

    @classmethod
    def of(cls, parameter: str, scheme: Scheme, parts: Mapping[str, TensorEntry]) -> "StoredMatrix":
        """From what a scheme says of the checkpoint's tensors.

        Raises:
            CheckpointError: shapes contradict each other.
        """
        shapes = {part: entry.shape for part, entry in parts.items()}
        format, rows, columns = scheme.format_of(parameter, shapes)
        return cls(parameter, scheme, tuple(parts.items()), format, rows, columns)

    @property
    def file(self) -> Path:
        """Where its first part lies."""
        return self._first.file

    @property
    def offset(self) -> int:
        return self._first.offset

    def convert_into(self, target: QuantizedMatrix, parts: Mapping[str, torch.Tensor]) -> None:
        """Fill ``target`` from the parts' values.

        Raises:
            CheckpointError: they hold what the format cannot; names the parameter and its file.
        """
        try:
            self.scheme.convert_into(target, parts)
        except CheckpointError as error:
            raise CheckpointError(f"{self.file}: {self.parameter}: {error}") from error

    @property
    def _first(self) -> TensorEntry:
        return min((entry for _, entry in self.parts), key=lambda entry: (str(entry.file), entry.offset))
