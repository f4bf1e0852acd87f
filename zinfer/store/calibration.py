"""The result of a calibration, saved with an unfinished store so that a resumed run rounds identically."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from zinfer.errors import CheckpointError
from zinfer.store.folder import place_file

CALIBRATION_NAME: Final = ".zinfer_calibration"


class Calibration:
    """Mean squares of the inputs of each weight.

    Args:
        sha256: of the prompts, in hexadecimal digits.
        measure: runs the model; returns mean squares [columns] by the weights' names.
    """

    def __init__(self, sha256: str, measure: Callable[[], Mapping[str, torch.Tensor]]) -> None:
        self.sha256 = sha256
        self._measure = measure
        self._squares: Mapping[str, torch.Tensor] | None = None

    def open(self, folder: Path) -> None:
        """Load the result of a former run from the folder, else measure; raises CheckpointError if it is damaged."""
        path = folder / CALIBRATION_NAME
        if not path.is_file():
            self._squares = self._measure()
            return
        try:
            self._squares = load(path.read_bytes())
        except SafetensorError as error:
            raise CheckpointError(f"{path}: damaged ({error}); delete it, and it is measured again") from error

    def keep(self, folder: Path) -> None:
        """Save the result in the folder; raises OSError if the disk is full or failed."""
        assert self._squares is not None, "open it first"
        if not (folder / CALIBRATION_NAME).is_file():
            place_file(folder / CALIBRATION_NAME, [save(dict(self._squares))])

    def squares(self, parameter: str) -> torch.Tensor | None:
        """Return the mean squares of a parameter's inputs, [columns]; None if no prompt has reached it."""
        assert self._squares is not None, "open it first"
        return self._squares.get(parameter)
