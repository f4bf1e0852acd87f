"""What a published format states: which tensors store a matrix, and where its rows and columns lie in them.

Ranks cut matrices along these. The sections of config.json that name a format are pydantic models; what they do not
know is refused with its key.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Generic, Literal, Protocol, Self, TypeAlias, TypeVar, cast

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from zinfer.config.quantization_rules import Quantization, QuantRule
from zinfer.errors import CheckpointError
from zinfer.kernels.quantized import FRAGMENT_COLUMNS, FRAGMENT_ROWS, QuantFormat, QuantizedMatrix
from zinfer.weights.folder import MAX_NAME

_FRAGMENT_STEP_COLUMNS = 64

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Axis:
    """The dimension of a tensor along which rows, or columns, follow one another: ``step`` of them to an element."""

    dim: int
    step: int = 1


@dataclass(frozen=True)
class PartGrid:
    """How a part lies over its matrix.

    Attributes:
        shape: of the part, or another one of its elements in the same order, in which the axes are meant.
        rows, columns: None: the whole part serves each of them.
    """

    shape: tuple[int, ...]
    rows: Axis | None = None
    columns: Axis | None = None


def native_grid(format: QuantFormat, part: str, shape: tuple[int, ...]) -> PartGrid:
    """Return how a part of a `QuantizedMatrix` lies over it."""
    if part in ("column_scales", "column_order"):
        return PartGrid(shape, columns=Axis(0))
    if part == "outer_scales":
        return PartGrid(shape)
    codes, groups = part == "codes", None if format.group_size is None else Axis(1, format.group_size)
    if format.in_grid and not codes:
        return PartGrid(shape, None if format.group_rows is None else Axis(0, format.group_rows), groups)
    if not format.in_fragments:
        columns = Axis(1, 8 // format.bits) if codes else groups
        return PartGrid(shape, Axis(0), columns)
    blocks = shape[0] // FRAGMENT_ROWS
    if not codes:
        return PartGrid((blocks, shape[1], FRAGMENT_ROWS), Axis(0, FRAGMENT_ROWS), groups)
    steps = shape[1] * 2 // _FRAGMENT_STEP_COLUMNS
    step_bytes = FRAGMENT_ROWS * _FRAGMENT_STEP_COLUMNS // 2
    return PartGrid((blocks, steps, step_bytes), Axis(0, FRAGMENT_ROWS), Axis(1, _FRAGMENT_STEP_COLUMNS))


def least_cut(format: QuantFormat) -> tuple[int, int]:
    """Return the rows, and the columns, of which a part of a matrix must have a multiple to keep its format."""
    if format.in_fragments:
        return FRAGMENT_ROWS, FRAGMENT_COLUMNS
    return format.group_rows or 1, format.group_size or 1


class Encoding(ABC):
    """What the tensors stored for a matrix, its parts, hold: where its rows and columns lie, how they fill a slab."""

    is_native: ClassVar[bool] = False
    """Whether the parts are those of a `QuantizedMatrix` without conversion, so that a block may stream from disk."""

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
        """Fill a matrix of the encoding's format from its parts, rounding scales to the target's dtype.

        The parts are on one device, the target on the same or another; temporaries take up to twice the parts' size.

        Raises:
            CheckpointError: the data is invalid; names the part, not the parameter.
        """


class InPlace(Encoding):
    """Parts that are those of a `QuantizedMatrix`, under its names for them: slabs hold the bytes of the file."""

    is_native = True

    def grid(self, format: QuantFormat, rows: int, part: str, shape: tuple[int, ...]) -> PartGrid:
        return native_grid(format, part, shape)

    def convert_into(self, target: QuantizedMatrix, parts: Mapping[str, torch.Tensor]) -> None:
        for name, part in parts.items():
            own = getattr(target, name)
            own.copy_(part.view(own.shape))  # what is cut in fragment order has dimensions of its own


IN_PLACE: Final = InPlace()

Entry = TypeVar("Entry", bound="StoredForm")


@dataclass(frozen=True)
class EncodedMatrix(Generic[Entry]):
    """A matrix as its parts store it.

    Attributes:
        format, rows, columns: of the resulting matrix.
        encoding: reads the parts.
        parts: by the encoding's names for them.
    """

    format: QuantFormat
    rows: int
    columns: int
    encoding: Encoding
    parts: Mapping[str, Entry]


class Typed(Protocol):
    """What has a dtype."""

    @property
    def dtype(self) -> torch.dtype: ...


class StoredForm(Typed, Protocol):
    """The form of a stored tensor."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def seen_as(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Self:
        """Return the same bytes as another tensor."""


class Scheme(ABC):
    """How a checkpoint stores its quantized weights, as its config.json says.

    A parameter belongs to the model (``model.layers.0.mlp.up_proj.weight``); its parts are the tensors stored for it
    (``qweight``). The tensors in the checkpoint decide which parameters are quantized; lists of ignored modules agree
    with them and are not read.
    """

    @property
    def part(self) -> str | None:
        """The rank among how many whose part of each layer the checkpoint holds; None: whole layers."""
        return None

    @property
    def checksums(self) -> Mapping[Path, str]:
        """The checksum of each file's bytes after its header, like `Block.checksum`; other files have none."""
        return {}

    @property
    def planned(self) -> Quantization | None:
        """Rules for the matrices of a model of which there are no files, as they would be stored; None: not known."""
        return None

    def set_aside(self, names: Collection[str]) -> Collection[str]:
        """Return the tensors that the scheme does not read, of all names in the checkpoint."""
        return ()

    @abstractmethod
    def stored(self, names: Collection[str]) -> dict[str, dict[str, str]]:
        """Return the checkpoint's name of each part, by quantized parameter; other names are ordinary tensors.

        Args:
            names: of all tensors in the checkpoint.

        Raises:
            CheckpointError: a parameter lacks a part, or also has a full weight.
        """

    @abstractmethod
    def matrix(self, parameter: str, parts: Mapping[str, Entry]) -> EncodedMatrix[Entry]:
        """Return a parameter as a quantized matrix.

        Args:
            parameter: a key of the result of `stored`.
            parts: its parts, by the names there.

        Raises:
            CheckpointError: shapes or dtypes contradict each other or the config; names tensor and shape.
        """


PATH: Final = "quantization_config"
REMEDY: Final = "use the full-precision checkpoint and quantize it while loading"
_UNSUPPORTED: Final = "unsupported"


def unsupported(reason: str) -> PydanticCustomError:
    """Return the error to raise in a validator for a valid value that is not supported."""
    return PydanticCustomError(_UNSUPPORTED, "{reason}", {"reason": reason})


def malformed(reason: str) -> PydanticCustomError:
    """Return the error to raise in a validator for an invalid value."""
    return PydanticCustomError("malformed", "{reason}", {"reason": reason})


class Section(BaseModel):
    """An object of the configuration; unknown members are ignored, and null members count as absent."""

    model_config = ConfigDict(strict=True, frozen=True, validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _normalized(cls, members: Any) -> Any:
        """Drop null members and lower-case strings: tools differ in how they write these."""
        if not isinstance(members, Mapping):
            return members
        stated = {key: value for key, value in members.items() if value is not None}
        return {key: value.lower() if isinstance(value, str) else value for key, value in stated.items()}


def _nothing(value: object) -> object:
    if value:
        raise unsupported("that is not supported")
    return value


Nothing = Annotated[Any, AfterValidator(_nothing)]
"""A member whose value must be absent, false or empty."""


def _group_size(value: int) -> int | None:
    if value < 1 and value != -1:
        raise malformed("neither -1 nor a number of columns")
    return None if value == -1 else value


GroupSize = Annotated[int | None, AfterValidator(_group_size)]
"""Columns that share a scale; None for whole rows, which GPTQ and AWQ write as -1."""


def refusal(error: ValidationError) -> CheckpointError:
    """Return the error to raise for the first fault of a section: names the key, its value, and what to do."""
    fault = error.errors()[0]
    kind = fault["type"]
    shown = "missing" if kind == "missing" else repr(fault["input"])
    shown = shown if len(shown) <= MAX_NAME else f"{shown[:MAX_NAME]}..."
    path = ".".join((PATH, *map(str, fault["loc"])))
    what = "not a known key, and it may change what weights are" if kind == "extra_forbidden" else fault["msg"]
    remedy = REMEDY if kind in (_UNSUPPORTED, "literal_error", "extra_forbidden") else "restore config.json"
    return CheckpointError(f"config.json: {path} is {shown}: {what}; {remedy}")


Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
Layout: TypeAlias = tuple[QuantFormat, int, int, Mapping[str, Collection[tuple[int, ...]]]]
"""Format, rows and columns of a matrix, and the shapes that each of its parts may have."""
FLOATS: Final = (torch.float16, torch.bfloat16, torch.float32)
INTEGERS: Final = (torch.int32, torch.int64)


class ForeignScheme(Section, Scheme):
    """A scheme that ``quantization_config`` describes: subclasses say which parts exist, this class checks them.

    A subclass that is an `Encoding` too converts its parts; of others, slabs hold the parts as they are.
    """

    marks: ClassVar[Collection[str]]
    """Names of parts that only quantized modules have."""
    set_aside_parts: ClassVar[Collection[str]] = ()
    """Names of parts that are not read: static scales of activations and of the KV cache."""

    @abstractmethod
    def part_names(self, module: str) -> tuple[Sequence[str], Sequence[str]]:
        """Return the required parts and the optional parts of a module."""

    @abstractmethod
    def layout(self, parameter: str, shapes: Shapes) -> Layout:
        """Return a parameter's layout from the config and the shapes of its parts."""

    def set_aside(self, names: Collection[str]) -> Collection[str]:
        found = [name for name in names if name.rpartition(".")[2] in self.set_aside_parts]
        if found:
            log.warning(
                "the checkpoint has static scales of activations or of the KV cache (%d tensors, %s the first): they "
                "are not read, activations stay in full precision; zinfer.kv_cache_dtype quantizes the KV cache",
                len(found),
                min(found),
            )
        return found

    def stored(self, names: Collection[str]) -> dict[str, dict[str, str]]:
        names = set(names)
        split = (name.rpartition(".") for name in names)
        modules = sorted({module for module, _, part in split if part in self.marks})
        return {f"{module}.weight": self.parts_of(module, names) for module in modules}

    def parts_of(self, module: str, names: Collection[str], between: str = ".") -> dict[str, str]:
        """Return the names of a module's parts.

        Args:
            names: of all tensors in the checkpoint.
            between: stands between the names of the module and of a part.

        Raises:
            CheckpointError: as `stored`.
        """
        required, optional = self.part_names(module)
        present = [part for part in (*required, *optional, "weight") if f"{module}{between}{part}" in names]
        missing = [part for part in required if part not in present]
        if missing:
            raise CheckpointError(
                f"{module} has {', '.join(present)} but no {', '.join(missing)}: the checkpoint is incomplete, or "
                f"not what quantization_config of config.json says; download it again"
            )
        if "weight" in present and "weight" not in required:
            raise CheckpointError(f"{module} has both {required[0]} and a full weight: remove one of them")
        return {part: f"{module}{between}{part}" for part in dict.fromkeys(present)}

    def matrix(self, parameter: str, parts: Mapping[str, Entry]) -> EncodedMatrix[Entry]:
        format, rows, columns = self.format_of(parameter, {part: entry.shape for part, entry in parts.items()})
        assert isinstance(self, Encoding), "a scheme whose parts are not converted places them"
        return EncodedMatrix(format, rows, columns, self, parts)

    def in_place(
        self,
        parameter: str,
        parts: Mapping[str, Entry],
        names: Mapping[str, str],
        dtypes: Mapping[str, Collection[torch.dtype]],
    ) -> EncodedMatrix[Entry]:
        """Return a parameter whose parts lie in slabs just as they are published.

        Args:
            names: the published name of each part of a `QuantizedMatrix`.
            dtypes: that each of those parts may have; scales of bytes are powers of two.

        Raises:
            CheckpointError: as `matrix`.
        """
        format, rows, columns = self.format_of(parameter, {part: entry.shape for part, entry in parts.items()})
        check_dtypes(parts, {name: dtypes[part] for part, name in names.items()}, parameter.removesuffix(".weight"))
        return _placed(format, rows, columns, {part: parts[name] for part, name in names.items()})

    def format_of(self, parameter: str, shapes: Shapes) -> tuple[QuantFormat, int, int]:
        """Return the format, rows and columns of a parameter. Raises CheckpointError as `matrix`, for shapes."""
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
                raise contradiction(parameter, part, shape, " or ".join(str(list(each)) for each in expected[part]))
        return format, rows, columns


class PublishedScheme(ForeignScheme):
    """A scheme whose parts lie in slabs just as they are published; `layout` leaves the dtype of scales open."""

    @abstractmethod
    def places(self, parameter: str, parts: Collection[str]) -> Mapping[str, str]:
        """Return the published name of each part of a `QuantizedMatrix`, of a parameter with these parts."""

    @abstractmethod
    def dtypes(self, parameter: str, parts: Collection[str]) -> Mapping[str, Collection[torch.dtype]]:
        """Return the dtypes that each of those parts may have; scales of bytes are powers of two."""

    def matrix(self, parameter: str, parts: Mapping[str, Entry]) -> EncodedMatrix[Entry]:
        return self.in_place(parameter, parts, self.places(parameter, parts), self.dtypes(parameter, parts))


def _placed(format: QuantFormat, rows: int, columns: int, parts: Mapping[str, Entry]) -> EncodedMatrix[Entry]:
    """Return a matrix whose published parts are seen as those of a `QuantizedMatrix`, byte for byte.

    Args:
        format: but for the dtype of scales, which is that of the published ones.
        parts: by the names of a `QuantizedMatrix`.
    """
    dtype = parts["scales"].dtype
    name = "float8_e8m0fnu" if dtype == torch.uint8 else str(dtype).removeprefix("torch.")
    format = replace(format, scale_dtype=cast("Any", name))
    shapes = format.part_shapes(rows, columns)
    seen = {part: entry.seen_as(format.part_dtype(part, dtype), shapes[part]) for part, entry in parts.items()}
    return EncodedMatrix(format, rows, columns, IN_PLACE, seen)


def e4m3_in_blocks(rows: int, columns: int, block: tuple[int | None, int | None]) -> QuantFormat:
    """Return the format of E4M3 codes with a scale for each block of so many rows and columns; None: all of them."""
    block_rows, block_columns = block
    return QuantFormat(
        8,
        block_columns if block_columns is not None and block_columns < columns else None,
        is_float=True,
        group_rows=block_rows if block_rows is not None and block_rows <= rows else None,
        in_grid=True,
    )


def planned_as(format: QuantFormat, scale_dtype: str, pattern: str | None = None) -> QuantRule:
    """Return the rule of a plan for matrices that a checkpoint stores in a format, with scales of a dtype."""
    return QuantRule(pattern, stored=replace(format, scale_dtype=cast("Any", scale_dtype)))


WIDE: Final = 1 << 62
"""Rows or columns of a matrix that no block of a format covers."""
MX_COLUMNS: Final = 32
"""Columns that share a scale in the OCP's microscaling formats."""


def e2m1_in_groups(size: int, outer: Literal["times", "over"] | None = None) -> QuantFormat:
    """Return the format of E2M1 codes with a scale for so many columns of a row, and perhaps a second level of them."""
    return QuantFormat(4, size, is_float=True, in_grid=True, outer=outer)


def group_of(size: int | None, columns: int) -> int | None:
    """Return the group size for a config's ``group_size``; None if a group is a whole row."""
    return size if size and size < columns else None


def matrix_shape(parameter: str, part: str, shapes: Shapes) -> tuple[int, int]:
    """Return the shape of a part. Raises CheckpointError if it does not have two dimensions."""
    shape = shapes[part]
    if len(shape) != 2:
        raise contradiction(parameter, part, shape, "a matrix")
    return shape[0], shape[1]


def check_dtypes(
    parts: Mapping[str, Typed], expected: Mapping[str, Collection[torch.dtype]], module: str | None = None
) -> None:
    """Raise CheckpointError for a part of an unexpected dtype; it names the module, if given, and the part."""
    for part, dtypes in expected.items():
        if part in parts and parts[part].dtype not in dtypes:
            wanted = " or ".join(str(dtype) for dtype in dtypes)
            name = part if module is None else f"{module}.{part}"
            raise CheckpointError(
                f"{name} is {parts[part].dtype}, not {wanted}: quantization_config of config.json does not describe "
                f"this checkpoint; download both again"
            )


def contradiction(parameter: str, part: str, shape: Sequence[int], wanted: str) -> CheckpointError:
    """Return the error to raise for a part of an unexpected shape."""
    tensor = f"{parameter.removesuffix('weight')}{part}"
    return CheckpointError(
        f"{tensor} has shape {list(shape)}, which does not go with its other parts and quantization_config "
        f"({wanted}): config.json describes another checkpoint, or the file is damaged; download both again"
    )
