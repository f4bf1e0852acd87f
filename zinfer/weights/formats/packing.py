"""Fills a quantized matrix with other tools' unsigned codes, scales and zeros.

Words have 32 bits and are little-endian; a row's first code is in the lowest bits.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd
from typing import Final

import torch

from zinfer.errors import CheckpointError
from zinfer.kernels.marlin_layout import put_scales
from zinfer.kernels.quantize import pack_int4
from zinfer.kernels.quantized import QuantFormat, QuantizedMatrix
from zinfer.weights.formats.scheme import Encoding, PartGrid, native_grid

SLICE_ELEMENTS: Final = 4 << 20  # elements converted at a time


def fill_words(target: QuantizedMatrix, words: torch.Tensor) -> None:
    """Fill the codes from packed words [rows, words] (int32, see `unpack`), a slice of rows at a time."""
    for rows in target.slices(SLICE_ELEMENTS):
        fill_codes(target.part(rows), unpack(words[rows], target.format.bits, target.columns))


def fill_codes(target: QuantizedMatrix, codes: torch.Tensor) -> None:
    """Fill the codes from [rows, columns] (uint8, or the bits of e4m3 numbers), in the target's order of columns.

    Symmetric 8-bit codes become signed: subtracting 128 inverts the highest bit of the byte.
    """
    if target.column_order is not None:
        codes = codes.index_select(1, target.column_order)
    if target.format.bits == 4:
        codes = pack_int4(codes, in_fragments=target.format.in_fragments)
    elif target.format.is_float:
        codes = codes.view(torch.float8_e4m3fn)
    elif target.format.symmetric:
        codes = (codes ^ 0x80).view(torch.int8)
    target.codes.copy_(codes)


def fill_groups(target: QuantizedMatrix, whole: QuantizedMatrix, begin: int, end: int) -> None:
    """Fill a matrix that picks columns from a whole one: from column ``begin`` to ``end`` in the order of groups."""
    assert whole.column_order is not None
    assert target.column_order is not None
    assert not whole.format.in_fragments
    size = whole.format.group_size or whole.columns
    groups = slice(begin // size, end // size)
    if whole.format.bits == 8:
        target.codes.copy_(whole.codes[:, begin:end])
    else:
        codes = unpack_int4(whole.codes[:, begin // 2 : end // 2])
        target.codes.copy_(pack_int4(codes, in_fragments=target.format.in_fragments))
    put_scales(target, whole.scales[:, groups])
    if target.zeros is not None and whole.zeros is not None:
        target.zeros.copy_(whole.zeros[:, groups])
    target.column_order.copy_(whole.column_order[begin:end])


def fill_scales(target: QuantizedMatrix, scales: torch.Tensor, part: str) -> None:
    """Fill the scales from [rows or 1, groups], rounded to the target's dtype.

    Raises:
        CheckpointError: a scale is not finite, or becomes infinite or 0 in the target's dtype.
    """
    if not bool(torch.isfinite(scales).all()):
        raise CheckpointError(f"{part} holds infinities or NaN: the file is damaged, download it again")
    rounded = scales.to(target.dtype)
    lost = ~torch.isfinite(rounded) | ((rounded == 0) & (scales != 0))
    if bool(lost.any()):
        raise CheckpointError(
            f"{part} holds {scales[lost][0].item():g}, beyond {target.dtype}: run the model in bfloat16 or float32"
        )
    put_scales(target, rounded.expand_as(target.scales))


def fill_zeros(target: QuantizedMatrix, zeros: torch.Tensor | None, part: str) -> None:
    """Fill the zeros from [rows or 1, groups] (uint8).

    Raises:
        CheckpointError: the target is symmetric, and a zero is not the middle code.
    """
    if target.zeros is not None:
        assert zeros is not None
        target.zeros.copy_(zeros)
        return
    middle = 1 << (target.format.bits - 1)
    if zeros is not None and bool((zeros != middle).any()):
        found = int(zeros[zeros != middle][0])
        raise CheckpointError(
            f"{part} holds the zero {found}, but quantization_config of config.json says that weights are symmetric "
            f"about {middle}: correct config.json (sym of gptq, zero_point of awq)"
        )


@dataclass(frozen=True)
class GridToRows(Encoding):
    """Codes of E4M3 with a grid of scales, which are written once a row and group, in the dtype of products.

    Args:
        published: the format of the parts, as for `InPlace`.
    """

    published: QuantFormat

    def rows_format(self, columns: int) -> QuantFormat:
        """Return the format of a matrix of so many columns."""
        size = self.published.group_size
        if size is not None:
            size = gcd(size, columns) if size < columns else None  # a cut last block has whole groups too
        return QuantFormat(8, size, is_float=True)

    def grid(self, format: QuantFormat, rows: int, part: str, shape: tuple[int, ...]) -> PartGrid:
        return native_grid(self.published, part, shape)

    def convert_into(self, target: QuantizedMatrix, parts: Mapping[str, torch.Tensor]) -> None:
        scales, published = parts["scales"].float(), self.published
        size = target.format.group_size
        if size is not None:
            assert published.group_size is not None
            groups = target.format.num_groups(target.columns)
            scales = scales.repeat_interleave(published.group_size // size, dim=1)[:, :groups]
        if published.group_rows is not None:
            scales = scales.repeat_interleave(published.group_rows, dim=0)[: target.rows]
        fill_scales(target, scales, "scales")
        target.codes.copy_(parts["codes"])


def fill_order(target: QuantizedMatrix, group_index: torch.Tensor, part: str) -> None:
    """Fill the order of columns, which `fill_codes` then uses, so that the columns of a group are adjacent.

    Args:
        group_index: the group of each column, [columns].

    Raises:
        CheckpointError: groups differ in size; or groups are scattered, but the target does not order columns.
    """
    size = target.format.group_size or target.columns
    if target.column_order is not None:
        num_groups = target.columns // size
        sizes = torch.bincount(group_index.long().clamp(0, num_groups), minlength=num_groups)
        if bool((sizes != size).any()):
            group = int((sizes != size).nonzero()[0])
            raise CheckpointError(
                f"{part} puts {int(sizes[group])} columns into group {group}, but group_size is {size}: the file is "
                "damaged or of another configuration, download both again"
            )
        target.column_order.copy_(torch.argsort(group_index, stable=True))
        return
    in_order = torch.arange(target.columns, device=group_index.device) // size
    wrong = (group_index != in_order).nonzero()
    if len(wrong):
        column = int(wrong[0])
        raise CheckpointError(
            f"{part} puts column {column} into group {int(group_index[column])} instead of {int(in_order[column])}: "
            "a checkpoint whose configuration does not say desc_act (actorder) has its groups in order; correct the "
            "configuration, or download both again"
        )


def bytes_of(words: torch.Tensor) -> torch.Tensor:
    """View words [rows, words] (int32) as bytes, [rows, 4 * words] uint8; copies words that are not contiguous."""
    flat = words.contiguous().view(-1)  # a contiguous matrix of one column may have any stride along it
    return flat.view(torch.uint8).view(words.shape[0], 4 * words.shape[1])


def unpack(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Return the first ``count`` codes of each row, [rows, count] uint8, from words [rows, words] int32. Bits: 4, 8."""
    octets = bytes_of(words)
    return octets[:, :count] if bits == 8 else unpack_int4(octets)[:, :count]


def unpack_int4(octets: torch.Tensor) -> torch.Tensor:
    """Return the codes in the halves of bytes [rows, bytes], the low one first: [rows, 2 * bytes] uint8."""
    return torch.stack((octets & 15, octets >> 4), dim=-1).flatten(1)
