"""The tensors that a checkpoint stores for one quantized parameter: found by name, checked by shape and dtype."""

from collections.abc import Collection, Mapping, Sequence
from typing import Final

import torch

from zinfer.errors import CheckpointError
from zinfer.kernels.quantized import QuantFormat

Shapes = Mapping[str, tuple[int, ...]]
FLOATS: Final = (torch.float16, torch.bfloat16, torch.float32)
INTEGERS: Final = (torch.int32, torch.int64)


def marked_modules(names: Collection[str], marks: Collection[str]) -> list[str]:
    """Modules that have a tensor of one of these names, sorted."""
    split = (name.rpartition(".") for name in names)
    return sorted({module for module, _, part in split if part in marks})


def parts_of(
    module: str, names: Collection[str], required: Sequence[str], optional: Sequence[str] = ()
) -> dict[str, str]:
    """A module's parts by their names in the checkpoint.

    Raises:
        CheckpointError: a required part is missing, or the module has a full weight beside its parts.
    """
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


def matrix_shape(parameter: str, part: str, shapes: Shapes) -> tuple[int, int]:
    """The shape of a part that has two dimensions, or the error that says it does not."""
    shape = shapes[part]
    if len(shape) != 2:
        raise _contradiction(parameter, part, shape, "a matrix")
    return shape[0], shape[1]


def check_shapes(parameter: str, shapes: Shapes, expected: Mapping[str, Collection[tuple[int, ...]]]) -> None:
    """Refuse a part that has none of its possible shapes."""
    for part, shape in shapes.items():
        if tuple(shape) not in expected[part]:
            raise _contradiction(parameter, part, shape, " or ".join(str(list(each)) for each in expected[part]))


def check_format(parameter: str, format: QuantFormat, rows: int, columns: int) -> None:
    """Refuse a matrix whose groups are ragged."""
    try:
        format.check_shape(rows, columns)
    except ValueError as error:
        raise CheckpointError(
            f"{parameter} is [{rows}, {columns}] and {error}: ragged groups are not supported; "
            f"use a checkpoint with another group size"
        ) from error


def check_dtypes(parts: Mapping[str, torch.Tensor], expected: Mapping[str, Collection[torch.dtype]]) -> None:
    """Refuse a part of another dtype than it is stored in."""
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
