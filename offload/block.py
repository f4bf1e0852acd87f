"""Blocks, the streaming units, and slabs, their bytes in stored form.

A slab holds a block's tensors back to back, each at a multiple of 256 bytes, in the order of the checkpoint file, so
that neighbours in the file stay neighbours in the slab and move in one copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

from zinfer.nvme.aligned import align_up

if TYPE_CHECKING:  # layouts are planned without torch
    import torch

SLAB_ALIGNMENT_BYTES: Final = 256
_ITEM_BYTES: Final = {"float32": 4, "int32": 4, "float16": 2, "bfloat16": 2} | dict.fromkeys(
    ("float8_e4m3fn", "float8_e8m0fnu", "int8", "uint8"), 1
)
NUM_CONVERSION_SLOTS: Final = 2
"""Slots for the stored form of blocks that are converted: while one is converted, the next one is read."""


@dataclass(frozen=True)
class NamedDtype:
    """A dtype of torch by its name, in layouts that are only planned, without torch."""

    name: str

    @property
    def itemsize(self) -> int:
        return _ITEM_BYTES[self.name]

    @property
    def is_floating_point(self) -> bool:
        return "float" in self.name

    def __str__(self) -> str:
        return f"torch.{self.name}"


def named_dtype(name: str) -> torch.dtype:
    """Return a `NamedDtype` where a plan takes a dtype of torch."""
    return cast("torch.dtype", NamedDtype(name))


def dtype_beside(dtype: torch.dtype, name: str) -> torch.dtype:
    """Return the dtype of a name: torch's, or a `NamedDtype` if ``dtype`` is one."""
    if isinstance(cast("object", dtype), NamedDtype):
        return named_dtype(name)
    import torch

    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


class Tier(Enum):
    """The memory that owns a block's slab between uses."""

    DEVICE = "device"
    """Resident in device memory; nothing is copied."""
    HOST = "host"
    """In host memory (pinned if the budget allows); one host-to-device copy per use."""
    DISK = "disk"
    """On disk, without memory of its own; one read and one host-to-device copy per use."""


@dataclass(frozen=True)
class SlabTensor:
    """One tensor of a slab: ``offset`` and ``nbytes`` are bytes within the slab."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int = 0

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def end(self) -> int:
        return self.offset + self.nbytes

    @property
    def dequantized_bytes(self) -> int:
        """Bytes of the tensor in the form that products of many tokens use, if that is another one; else 0."""
        return 0

    def view(self, slab: torch.Tensor) -> torch.Tensor:
        """Return the tensor as a view of the slab's bytes (uint8)."""
        return slab[self.offset : self.end].view(self.dtype).view(self.shape)

    def parameter(self, slab: torch.Tensor) -> torch.nn.Parameter:
        """Return the tensor as a parameter for modules."""
        import torch

        return torch.nn.Parameter(self.view(slab), requires_grad=False)


@dataclass(frozen=True)
class Home:
    """The tier that owns a block's slab.

    ``pinned`` tells whether a HOST slab is registered with CUDA. ``shared``: each rank has only its range of a slab on
    the device, which is gathered for each use. Slabs on the host and on disk are always shared by several ranks.
    """

    tier: Tier
    pinned: bool = False
    shared: bool = False


@dataclass(frozen=True)
class SlabLayout:
    """The tensors of a slab; equal layouts share their views of a slot."""

    tensors: tuple[SlabTensor, ...]

    def __hash__(self) -> int:  # cached: a layout is looked up at every use of a block
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self.tensors)

    @classmethod
    def pack(cls, specs: Iterable[tuple[str, torch.dtype, tuple[int, ...]]]) -> SlabLayout:
        """Lay out ``(name, dtype, shape)`` one after the other, each aligned to 256 bytes."""
        return cls.place(SlabTensor(*spec) for spec in specs)

    @classmethod
    def place(cls, tensors: Iterable[SlabTensor]) -> SlabLayout:
        """Assign offsets to tensors, one after the other, each aligned to 256 bytes."""
        placed: list[SlabTensor] = []
        offset = 0
        for tensor in tensors:
            placed.append(replace(tensor, offset=offset))
            offset = align_up(placed[-1].end, SLAB_ALIGNMENT_BYTES)
        return cls(tuple(placed))

    @cached_property
    def nbytes(self) -> int:
        """Size of the slab, rounded up to the alignment."""
        return align_up(max((tensor.end for tensor in self.tensors), default=0), SLAB_ALIGNMENT_BYTES)

    @cached_property
    def numel(self) -> int:
        """Elements of all tensors."""
        return sum(tensor.numel for tensor in self.tensors)

    @cached_property
    def max_dequantized_bytes(self) -> int:
        """Dequantized bytes of the largest quantized matrix; 0 if there is none."""
        return max((tensor.dequantized_bytes for tensor in self.tensors), default=0)

    def views(self, buffer: torch.Tensor) -> dict[str, torch.nn.Parameter]:
        """Return the tensors by name, as parameters over ``buffer`` (uint8, at least ``nbytes`` long)."""
        return {tensor.name: tensor.parameter(buffer) for tensor in self.tensors}

    def fill(self, slab: torch.Tensor, values: Mapping[str, torch.Tensor]) -> None:
        """Copy tensors, by name, to their places in ``slab`` (uint8)."""
        for tensor in self.tensors:
            tensor.view(slab).copy_(values[tensor.name])


@dataclass(frozen=True)
class Extent:
    """Bytes of a checkpoint file and their place in a slab; elements are cast when the two dtypes differ.

    A tensor may consist of several extents: stacking and concatenating along the first axis only place bytes.
    Columns of a matrix are ``rows`` equal runs of bytes, whose beginnings are ``pitch`` bytes apart in the file and
    ``slab_pitch`` in the slab; ``nbytes`` counts the runs alone.
    """

    file: Path
    offset: int
    nbytes: int
    dtype: torch.dtype
    slab_offset: int
    slab_dtype: torch.dtype
    rows: int = 1
    pitch: int = 0
    slab_pitch: int = 0

    @property
    def slab_nbytes(self) -> int:
        return self.nbytes // self.dtype.itemsize * self.slab_dtype.itemsize

    @property
    def span_nbytes(self) -> int:
        """Bytes in the file from the first run's beginning to the last one's end."""
        return (self.rows - 1) * self.pitch + self.nbytes // self.rows

    def rows_of(self, begin: int, count: int) -> Extent:
        """Return ``count`` of the runs from run ``begin`` on."""
        return replace(
            self,
            offset=self.offset + begin * self.pitch,
            slab_offset=self.slab_offset + begin * self.slab_pitch,
            nbytes=self.nbytes // self.rows * count,
            rows=count,
        )


@dataclass(frozen=True)
class Conversion:
    """Converts weights from another stored form into a slab, while homes are filled.

    Attributes:
        layout: of the slab that the stored form is read into.
        extents: the bytes on disk that fill that slab; empty for weights in memory.
        convert: writes the block's slab (second argument) from the stored slab, on the compute stream; both are uint8
            and on one device.
    """

    layout: SlabLayout
    extents: tuple[Extent, ...]
    convert: Callable[[torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True)
class Block:
    """The streaming unit: a name for messages, the slab's layout, and the extents that fill it from disk.

    ``index`` is the block's place in the model's order. ``extents`` is empty for a module with weights in memory, and
    for a block with a ``conversion``; such blocks have no home on disk. ``checksum`` is the xxh3_128, in hexadecimal
    digits, over the bytes of all extents read, in the file's order; None if not known. A block that ``encloses``
    others is in use while they stream, so its home is the device.
    """

    index: int
    name: str
    layout: SlabLayout
    extents: tuple[Extent, ...] = ()
    conversion: Conversion | None = None
    checksum: str | None = None
    encloses: bool = False

    @property
    def nbytes(self) -> int:
        return self.layout.nbytes

    @property
    def read_extents(self) -> tuple[Extent, ...]:
        """The extents that are read from disk to fill the block's home."""
        return self.extents if self.conversion is None else self.conversion.extents

    # A plan asks for these of each block hundreds of times, and a block of experts may have thousands of extents.
    @cached_property
    def file_bytes(self) -> int:
        """Bytes of the extents."""
        return sum(extent.nbytes for extent in self.extents)

    @cached_property
    def has_gaps(self) -> bool:
        """Whether the extents leave out bytes between those that they hold."""
        return any(extent.rows > 1 for extent in self.extents)

    @cached_property
    def covered_bytes(self) -> int:
        """Bytes of the aligned reads that fill the block's home."""
        from zinfer.offload.chunks import covered_bytes  # which needs this module

        return covered_bytes(self.read_extents)


def conversion_bytes(blocks: Sequence[Block], *, to_host: bool) -> int:
    """Return the device memory of conversions while homes are filled; ``to_host``: CUDA converts for host slabs."""
    stored = max((block.conversion.layout.nbytes for block in blocks if block.conversion), default=0)
    slab = max((block.nbytes for block in blocks if block.conversion), default=0)
    return NUM_CONVERSION_SLOTS * stored + (slab if to_host else 0)
