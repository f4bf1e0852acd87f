"""GGUF's blocks: what the bytes of each of ggml's types stand for, and how a model's matrices are made of them.

A row of a matrix is a row of blocks; a block holds codes and the scales that they share (ggml's ggml-common.h; the
package `gguf` computes the same values with numpy). `decode` takes bytes and returns values, exactly those of ggml,
where the bytes are: on a GPU by a kernel, elsewhere by torch's operations. A `BlockForm` makes a
parameter of them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Final, TypeAlias

import torch

from zinfer.kernels.decode_blocks import E2M1_LEVELS, IQ4_LEVELS, KINDS, decode_blocks, level_table
from zinfer.weights.gguf_header import GgmlType
from zinfer.weights.gguf_model import Encoded, Recipe
from zinfer.weights.header import TensorEntry

_Decoder: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
SLICE_VALUES: Final = 1 << 23
"""Values decoded at once; temporaries take several times their bytes."""


def decode(type: GgmlType, rows: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the values [rows, columns], rounded to a dtype, of rows of blocks [rows, bytes of a row], uint8."""
    if rows.device.type == "cuda" and type.name in KINDS:
        columns = rows.shape[1] // type.nbytes * type.values
        out = torch.empty(rows.shape[0], columns, dtype=dtype, device=rows.device)
        return decode_blocks(type.name, rows.contiguous(), out)
    blocks = rows.reshape(-1, type.nbytes)
    return _DECODERS[type.name](blocks).reshape(rows.shape[0], -1).to(dtype)


def _half(blocks: torch.Tensor, begin: int) -> torch.Tensor:
    """Return the float16 at this byte of each block, [blocks, 1] float32."""
    return blocks[:, begin : begin + 2].clone(memory_format=torch.contiguous_format).view(torch.float16).float()


def _shifted(octets: torch.Tensor, width: int, bits: int) -> torch.Tensor:
    """Return the fields of ``bits`` bits of each byte, [blocks, bytes * fields]: the lowest of ``width`` bytes first.

    Upper bits of other fields are left in.
    """
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=octets.device).view(-1, 1)
    return (octets.reshape(octets.shape[0], -1, 1, width) >> shifts).reshape(octets.shape[0], -1)


def _nibbles(octets: torch.Tensor, width: int = 16) -> torch.Tensor:
    return _shifted(octets, width, 4) & 15


def _bits(octets: torch.Tensor, width: int) -> torch.Tensor:
    return _shifted(octets, width, 1) & 1


def _levels(codes: torch.Tensor, levels: tuple[int, ...]) -> torch.Tensor:
    return level_table(levels, codes.device)[codes.int()]


def _grouped(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return codes [blocks, values] as float32 beside scales [blocks, groups]: [blocks, groups, values a group]."""
    return codes.reshape(*scales.shape, -1).float()


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).float() - 8)


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]).float() + _half(blocks, 2)


def _fifth_bits(octets: torch.Tensor) -> torch.Tensor:
    """Return 32 bits of each block, [blocks, 32], of 4 bytes [blocks, 4], at the fifth place."""
    return _bits(octets, 1) << 4


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    codes = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return _half(blocks, 0) * (codes.float() - 16)


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    codes = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return _half(blocks, 0) * codes.float() + _half(blocks, 2)


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * blocks[:, 2:].view(torch.int8).float()


def _q2_k(blocks: torch.Tensor) -> torch.Tensor:
    scales = _half(blocks, 80) * (blocks[:, :16] & 15).float()
    least = _half(blocks, 82) * (blocks[:, :16] >> 4).float()
    codes = _shifted(blocks[:, 16:80], 32, 2) & 3
    return scales[..., None] * _grouped(codes, scales) - least[..., None]


def _q3_k(blocks: torch.Tensor) -> torch.Tensor:
    low, high = _nibbles(blocks[:, 96:104], 8), _shifted(blocks[:, 104:108], 4, 2) & 3
    scales = _half(blocks, 108) * ((low | high << 4).float() - 32)
    codes = (_shifted(blocks[:, 32:96], 32, 2) & 3) | _bits(blocks[:, :32], 32) << 2
    return scales[..., None] * (_grouped(codes, scales) - 4)


def _scales_k(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales and the least values, [blocks, 8], of Q4_K and Q5_K, in 6 bits each of bytes 4 to 16."""
    scales, least, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    upper = (rest & 15) | (scales >> 2 & 48), (rest >> 4) | (least >> 2 & 48)
    both = torch.cat((scales & 63, upper[0]), 1), torch.cat((least & 63, upper[1]), 1)
    return _half(blocks, 0) * both[0].float(), _half(blocks, 2) * both[1].float()


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    scales, least = _scales_k(blocks)
    return scales[..., None] * _grouped(_nibbles(blocks[:, 16:], 32), scales) - least[..., None]


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    scales, least = _scales_k(blocks)
    codes = _nibbles(blocks[:, 48:], 32) | _bits(blocks[:, 16:48], 32) << 4
    return scales[..., None] * _grouped(codes, scales) - least[..., None]


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    scales = _half(blocks, 208) * blocks[:, 192:208].view(torch.int8).float()
    codes = _nibbles(blocks[:, :128], 64) | (_shifted(blocks[:, 128:192], 32, 2) & 3) << 4
    return scales[..., None] * (_grouped(codes, scales) - 32)


def _iq4_nl(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * _levels(_nibbles(blocks[:, 2:]), IQ4_LEVELS)


def _iq4_xs(blocks: torch.Tensor) -> torch.Tensor:
    low, high = _nibbles(blocks[:, 4:8], 1), _shifted(blocks[:, 2:4], 1, 2) & 3
    scales = _half(blocks, 0) * ((low | high << 4).float() - 32)
    return scales[..., None] * _levels(_nibbles(blocks[:, 8:]), IQ4_LEVELS).view(*scales.shape, -1)


def _mxfp4(blocks: torch.Tensor) -> torch.Tensor:
    exponents = blocks[:, :1].int()
    scales = torch.where(exponents < 2, 0x200000 << exponents.clamp(max=1), (exponents - 1) << 23)
    return scales.view(torch.float32) * _levels(_nibbles(blocks[:, 1:]), E2M1_LEVELS)


def _plain(dtype: torch.dtype) -> _Decoder:
    return lambda blocks: blocks.contiguous().view(dtype).float()


_DECODERS: Final[Mapping[str, _Decoder]] = {
    "F32": _plain(torch.float32),
    "F16": _plain(torch.float16),
    "BF16": _plain(torch.bfloat16),
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}


@dataclass(frozen=True)
class BlockForm:
    """How a parameter is made of blocks, wherever these are.

    Attributes:
        shape: of the parameter.
        recipe, unit: as of `Encoded`.
        types: of its tensors of blocks.
        sizes: rows, and bytes of a row, of each of these.
    """

    shape: tuple[int, ...]
    recipe: Recipe
    unit: int
    types: tuple[GgmlType, ...]
    sizes: tuple[tuple[int, int], ...]

    @property
    def is_by_rows(self) -> bool:
        """Whether the parameter's rows are those of one tensor of blocks, perhaps in another order within a unit."""
        return self.recipe in _BY_ROWS

    def decode_into(self, target: torch.Tensor, blocks: Sequence[torch.Tensor]) -> None:
        """Fill a tensor of the parameter's shape, contiguous and of any floating-point dtype.

        Args:
            blocks: uint8 [rows, bytes of a row] of each size, on the target's device.
        """
        if self.is_by_rows:
            rows = target.view(blocks[0].shape[0], self.shape[-1])
            for own in self.slices():
                rows[own].copy_(self.rows(blocks[0], own, target.dtype))
        elif self.recipe is Recipe.ALTERNATE:
            gate, up = (decode(*each) for each in zip(self.types, blocks, strict=True))
            target.copy_(torch.stack((gate, up), -1).flatten(-2))
        else:
            each = target.view(self.unit, -1, target.shape[-1])
            for number in range(self.unit):
                each[number].copy_(self.one(blocks, number, target.dtype))

    def rows(self, blocks: torch.Tensor, own: slice, dtype: torch.dtype) -> torch.Tensor:
        """Return the values of a range of rows that is one of `slices`."""
        if self.recipe is Recipe.LESS_ONE:
            return (decode(self.types[0], blocks[own]) - 1).to(dtype)
        values = decode(self.types[0], blocks[own], dtype)
        if self.recipe is Recipe.HALVES:
            width = self.shape[-1] if len(self.shape) > 1 else 1
            return values.view(-1, self.unit // 2, 2, width).transpose(1, 2).reshape(values.shape)
        return values

    def one(self, blocks: Sequence[torch.Tensor], number: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the matrix of one head or expert, where the recipe makes it of several or transposed."""
        parts = (part.view(self.unit, -1, part.shape[-1])[number] for part in blocks)
        return _GATHERED[self.recipe]([decode(*each, dtype) for each in zip(self.types, parts, strict=True)])

    def slices(self) -> Iterator[slice]:
        """Yield ranges of rows with a limited number of values, of whole heads."""
        count, unit = self.sizes[0][0], self.unit if self.recipe is Recipe.HALVES and len(self.shape) > 1 else 1
        step = max(SLICE_VALUES // max(self.shape[-1] * unit, 1), 1) * unit
        for begin in range(0, count, step):
            yield slice(begin, min(begin + step, count))


_BY_ROWS: Final = (Recipe.ROWS, Recipe.HALVES, Recipe.LESS_ONE)
_GATHERED: Final[Mapping[Recipe, Callable[[list[torch.Tensor]], torch.Tensor]]] = {
    Recipe.KEYS_VALUES: lambda values: torch.cat((values[0].t(), values[1])),
    Recipe.GATE_UP: lambda values: torch.stack((values[0].t(), values[1].t()), -1).flatten(-2),
    Recipe.TRANSPOSED: lambda values: values[0].t(),
}
"""Of one head or expert: its matrix, from those that are stored."""


@dataclass(frozen=True, eq=False)
class EncodedTensor:
    """A parameter of a checkpoint that is decoded from blocks.

    Attributes:
        name: of the parameter.
        shape: of its values.
        forms: of its pieces, one below the other.
        blocks: the tensors of the file that these are made of, in their order: uint8 [rows, bytes of a row].
    """

    name: str
    shape: tuple[int, ...]
    forms: tuple[BlockForm, ...]
    blocks: tuple[TensorEntry, ...]

    @classmethod
    def of(cls, name: str, encoded: Encoded, blocks: Sequence[TensorEntry]) -> "EncodedTensor":
        """Make the parameter from the tensors of its parts."""
        types = tuple(part.type for part in encoded.parts)
        sizes = tuple((entry.shape[0], entry.shape[1]) for entry in blocks)
        form = BlockForm(encoded.shape, encoded.recipe, encoded.unit, types, sizes)
        return cls(name, encoded.shape, (form,), tuple(blocks))

    @classmethod
    def join(cls, name: str, shape: tuple[int, ...], pieces: Sequence["EncodedTensor"]) -> "EncodedStack | None":
        """Return the parameter that has these one below the other; None if they do not form its shape."""
        is_whole = sum(prod(each.shape) for each in pieces) == prod(shape)
        if not is_whole or any(each.shape[-1] != shape[-1] for each in pieces):
            return None
        forms = tuple(form for each in pieces for form in each.forms)
        blocks = tuple(block for each in pieces for block in each.blocks)
        return EncodedStack(name, shape, forms, blocks, tuple(pieces))

    @property
    def dtype(self) -> torch.dtype:
        """Of the values that the blocks are decoded to."""
        return torch.float32

    @property
    def nbytes(self) -> int:
        """Bytes of its blocks."""
        return sum(each.nbytes for each in self.blocks)

    @property
    def file(self) -> Path:
        """The file of its first blocks."""
        return self.blocks[0].file

    @property
    def offset(self) -> int:
        return self.blocks[0].offset

    @property
    def pieces(self) -> tuple["EncodedTensor", ...]:
        """The parameters that it consists of: itself."""
        return (self,)

    def read(self) -> torch.Tensor:
        """Read and decode the values into host memory. Raises CheckpointError as `TensorEntry.read`."""
        values = torch.empty(self.shape)
        decode_pieces(self.forms, values, [each.read() for each in self.blocks])
        return values


@dataclass(frozen=True, eq=False)
class EncodedStack(EncodedTensor):
    """Parameters one below the other, such as the matrices of a mixture's experts."""

    stacked: tuple[EncodedTensor, ...]

    @property
    def pieces(self) -> tuple[EncodedTensor, ...]:
        return self.stacked


def decode_pieces(forms: Sequence[BlockForm], target: torch.Tensor, blocks: Sequence[torch.Tensor]) -> None:
    """Fill a tensor whose rows are those of several pieces, as `BlockForm.decode_into`."""
    rows, begin, first = target.view(-1, target.shape[-1]), 0, 0
    for form in forms:
        end, last = begin + prod(form.shape[:-1]), first + len(form.sizes)
        form.decode_into(rows[begin:end].view(form.shape), blocks[first:last])
        begin, first = end, last
