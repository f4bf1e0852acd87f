"""What every way of storing quantized weights in a checkpoint implements."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import ClassVar

import torch

from zinfer.kernels.quantized import QuantFormat, QuantizedMatrix


class Scheme(ABC):
    """How a checkpoint stores its quantized weights, as its config.json says.

    A parameter is one of the model's (``model.layers.0.mlp.up_proj.weight``), a part one of the tensors stored for it
    (``qweight``). What is quantized is decided by the tensors that are there: lists of modules left alone agree with
    them and are not read.
    """

    is_native: ClassVar[bool] = False
    """Whether the parts are a `QuantizedMatrix` as it is, so that a block may stream from disk."""

    @property
    def checksums(self) -> Mapping[Path, str]:
        """Of what each file holds behind its header, as `Block.checksum` is; files that are not listed have none."""
        return {}

    @abstractmethod
    def stored(self, names: Collection[str]) -> dict[str, dict[str, str]]:
        """For each quantized parameter the checkpoint's name of each part; names not mentioned are ordinary tensors.

        Args:
            names: of all tensors in the checkpoint.

        Raises:
            CheckpointError: a parameter lacks a part, or is there in full as well.
        """

    @abstractmethod
    def format_of(self, parameter: str, shapes: Mapping[str, tuple[int, ...]]) -> tuple[QuantFormat, int, int]:
        """Format, rows and columns of a parameter as a quantized matrix.

        Args:
            parameter: one of those that `stored` gives.
            shapes: of its parts.

        Raises:
            CheckpointError: shapes that contradict each other or the config; names tensor and shape.
        """

    @abstractmethod
    def convert_into(self, target: QuantizedMatrix, parts: Mapping[str, torch.Tensor]) -> None:
        """Fill a matrix of the format that `format_of` gave out of its parts, rounding scales to the target's dtype.

        The parts are on one device, the target on the same or another; temporaries take up to twice the parts.

        Raises:
            CheckpointError: what only the data shows; names the part, not the parameter.
        """
