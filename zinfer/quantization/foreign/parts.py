"""The tensors that a checkpoint stores for one quantized parameter: found by name, checked by shape and dtype."""

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar, Final, TypeAlias

import torch

from zinfer.errors import CheckpointError
from zinfer.kernels.quantized import QuantFormat
from zinfer.quantization.foreign.contract import Scheme
from zinfer.quantization.foreign.section import Section

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
Layout: TypeAlias = tuple[QuantFormat, int, int, Mapping[str, Collection[tuple[int, ...]]]]
"""Format, rows and columns of a matrix, and the shapes that each of its parts may have."""
FLOATS: Final = (torch.float16, torch.bfloat16, torch.float32)
INTEGERS: Final = (torch.int32, torch.int64)


class ForeignScheme(Section, Scheme):
    """A scheme that ``quantization_config`` describes: subclasses say which parts exist, this class checks them."""

    marks: ClassVar[Collection[str]]
    """Names of parts that only quantized modules have."""

    @abstractmethod
    def part_names(self, module: str) -> tuple[Sequence[str], Sequence[str]]:
        """Return the required parts and the optional parts of a module."""

    @abstractmethod
    def layout(self, parameter: str, shapes: Shapes) -> Layout:
        """Return a parameter's layout from the config and the shapes of its parts."""

    def stored(self, names: Collection[str]) -> dict[str, dict[str, str]]:
        names = set(names)
        split = (name.rpartition(".") for name in names)
        modules = sorted({module for module, _, part in split if part in self.marks})
        return {f"{module}.weight": self._parts_of(module, names) for module in modules}

    def _parts_of(self, module: str, names: Collection[str]) -> dict[str, str]:
        required, optional = self.part_names(module)
        present = [part for part in (*required, *optional, "weight") if f"{module}.{part}" in names]
        missing = [part for part in required if part not in present]
        if missing:
            raise CheckpointError(
                f"{module} has {', '.join(present)} but no {', '.join(missing)}: the checkpoint is incomplete, or "
                f"not what quantization_config of config.json says; download it again"
            )
        if "weight" in present and "weight" not in required:
            raise CheckpointError(f"{module} has both {required[0]} and a full weight: remove one of them")
        return {part: f"{module}.{part}" for part in dict.fromkeys(present)}

    def format_of(self, parameter: str, shapes: Shapes) -> tuple[QuantFormat, int, int]:
        format, rows, columns, expected = self.layout(parameter, shapes)
        try:
            format.check_shape(rows, columns)
        except ValueError as error:
            raise CheckpointError(
                f"{parameter} is [{rows}, {columns}] and {error}: ragged groups are not supported; "
                f"use a checkpoint with another group size"
            ) from error
        for part, shape in shapes.items():
            if tuple(shape) not in expected[part]:
                raise _contradiction(parameter, part, shape, " or ".join(str(list(each)) for each in expected[part]))
        return format, rows, columns


def group_of(size: int | None, columns: int) -> int | None:
    """Return the group size for a config's ``group_size``; None if a group is a whole row."""
    return size if size and size < columns else None


def matrix_shape(parameter: str, part: str, shapes: Shapes) -> tuple[int, int]:
    """Return the shape of a part. Raises CheckpointError if it does not have two dimensions."""
    shape = shapes[part]
    if len(shape) != 2:
        raise _contradiction(parameter, part, shape, "a matrix")
    return shape[0], shape[1]


def check_dtypes(parts: Mapping[str, torch.Tensor], expected: Mapping[str, Collection[torch.dtype]]) -> None:
    """Raise CheckpointError for a part of an unexpected dtype."""
    for part, dtypes in expected.items():
        if part in parts and parts[part].dtype not in dtypes:
            wanted = " or ".join(str(dtype) for dtype in dtypes)
            raise CheckpointError(
                f"{part} is {parts[part].dtype}, not {wanted}: quantization_config of config.json does not describe "
                f"this checkpoint; download both again"
            )


def _contradiction(parameter: str, part: str, shape: Sequence[int], wanted: str) -> CheckpointError:
    tensor = f"{parameter.removesuffix('weight')}{part}"
    return CheckpointError(
        f"{tensor} has shape {list(shape)}, which does not go with its other parts and quantization_config "
        f"({wanted}): config.json describes another checkpoint, or the file is damaged; download both again"
    )
