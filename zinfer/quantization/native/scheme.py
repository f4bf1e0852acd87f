"""The scheme of stores, whose files hold parts in the layout of slabs."""

from collections.abc import Collection, Mapping
from pathlib import Path

import torch

from zinfer.errors import CheckpointError
from zinfer.kernels.quantized import QuantFormat, QuantizedMatrix
from zinfer.quantization.foreign.contract import Scheme
from zinfer.quantization.grid import PartGrid, native_grid
from zinfer.quantization.native.manifest import MANIFEST_NAME, Manifest, read_manifest


class StoreScheme(Scheme):
    """The scheme of `zinfer quantize`: parts are those of `QuantizedMatrix` and need no conversion."""

    is_native = True

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._path, self._manifest = folder / MANIFEST_NAME, manifest

    @property
    def part(self) -> str | None:
        return self._manifest.identity.settings.get("shard")

    @property
    def checksums(self) -> Mapping[Path, str]:
        """The xxh3_128 of each block file's bytes after the header, in hex, by absolute path."""
        return {self._path.parent / file: block.checksum for file, block in self._manifest.blocks.items()}

    @classmethod
    def open(cls, folder: Path) -> "StoreScheme":
        """Open a finished store. Raises CheckpointError as `read_manifest`."""
        return cls(folder.absolute(), read_manifest(folder.absolute()))

    def stored(self, names: Collection[str]) -> dict[str, dict[str, str]]:
        found = {
            parameter: {part: f"{parameter}.{part}" for part in stored.format.part_shapes(0, stored.columns)}
            for parameter, stored in self._manifest.parameters.items()
        }
        absent = [tensor for parts in found.values() for tensor in parts.values() if tensor not in names]
        if absent:
            raise CheckpointError(
                f"{self._path}: parameters names {len(absent)} tensors that no file holds, "
                f"{absent[0]} the first: files and manifest are of different stores; copy the whole folder again"
            )
        return found

    def format_of(self, parameter: str, shapes: Mapping[str, tuple[int, ...]]) -> tuple[QuantFormat, int, int]:
        stored = self._manifest.parameters[parameter]
        format, columns, codes = stored.format, stored.columns, shapes["codes"]
        rows = codes[0] if codes else 0
        expected = format.part_shapes(rows, columns)
        for part, shape in shapes.items():
            if tuple(shape) != expected[part]:
                raise CheckpointError(
                    f"{parameter}.{part} has shape {list(shape)}, {MANIFEST_NAME} wants {list(expected[part])}: files "
                    "and manifest are of different stores; copy the whole folder again"
                )
        try:
            format.check_shape(rows, columns)
        except ValueError as error:
            raise CheckpointError(
                f"{self._path}: {parameter}: {error}: the manifest is damaged; copy the whole folder again"
            ) from error
        return format, rows, columns

    def grid(self, format: QuantFormat, rows: int, part: str, shape: tuple[int, ...]) -> PartGrid:
        return native_grid(format, part, shape)

    def convert_into(self, target: QuantizedMatrix, parts: Mapping[str, torch.Tensor]) -> None:
        for name, part in parts.items():
            own = getattr(target, name)
            own.copy_(part.view(own.shape))  # what is cut in fragment order has dimensions of its own
