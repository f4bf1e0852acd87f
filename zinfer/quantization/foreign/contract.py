"""The interface of schemes that store quantized weights in a checkpoint."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import ClassVar

import torch

from zinfer.kernels.quantized import QuantFormat, QuantizedMatrix
from zinfer.quantization.grid import PartGrid


class Scheme(ABC):
    """How a checkpoint stores its quantized weights, as its config.json says.

    A parameter belongs to the model (``model.layers.0.mlp.up_proj.weight``); its parts are the tensors stored for it
    (``qweight``). The tensors in the checkpoint decide which parameters are quantized; lists of ignored modules agree
    with them and are not read.
    """

    is_native: ClassVar[bool] = False
    """Whether the parts are those of a `QuantizedMatrix` without conversion, so that a block may stream from disk."""

    @property
    def part(self) -> str | None:
        """The rank among how many whose part of each layer the checkpoint holds; None: whole layers."""
        return None

    @property
    def checksums(self) -> Mapping[Path, str]:
        """The checksum of each file's bytes after its header, like `Block.checksum`; other files have none."""
        return {}

    @abstractmethod
    def stored(self, names: Collection[str]) -> dict[str, dict[str, str]]:
        """Return the checkpoint's name of each part, by quantized parameter; other names are ordinary tensors.

        Args:
            names: of all tensors in the checkpoint.

        Raises:
            CheckpointError: a parameter lacks a part, or also has a full weight.
        """

    @abstractmethod
    def format_of(self, parameter: str, shapes: Mapping[str, tuple[int, ...]]) -> tuple[QuantFormat, int, int]:
        """Return the format, rows and columns of a parameter as a quantized matrix.

        Args:
            parameter: a key of the result of `stored`.
            shapes: of its parts.

        Raises:
            CheckpointError: shapes contradict each other or the config; names tensor and shape.
        """

    @abstractmethod
    def grid(self, format: QuantFormat, rows: int, part: str, shape: tuple[int, ...]) -> PartGrid:
        """Return how a part of this shape lies over a matrix of this format and so many rows."""

    def of_cut(
        self, parts: Mapping[str, torch.Tensor], rows: int, columns: int, own: torch.Tensor
    ) -> Mapping[str, torch.Tensor]:
        """Return cut parts with what they say of the whole matrix in terms of what is left of it.

        Args:
            rows, columns: of the whole matrix.
            own: the columns that are left, by their numbers in the whole matrix.
        """
        return parts

    @abstractmethod
    def convert_into(self, target: QuantizedMatrix, parts: Mapping[str, torch.Tensor]) -> None:
        """Fill a matrix of the format from `format_of` from its parts, rounding scales to the target's dtype.

        The parts are on one device, the target on the same or another; temporaries take up to twice the parts' size.

        Raises:
            CheckpointError: the data is invalid; names the part, not the parameter.
        """
