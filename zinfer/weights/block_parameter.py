"""Parameters that stay in GGUF's blocks: their place in a slab, and the tensor that modules compute with.

[Note: blocks stay as stored]
A slab holds the bytes of the file, which stream from disk or host memory at a fourth of the values' size. Products
decode a range of rows at a time, lookups the rows that are looked up, and experts one after another; any other
operator decodes the whole parameter. Where weights do not move (on a CPU, unless they stay on disk), and where they are
quantized anew, they are decoded once, while they are loaded (`zinfer.model.outline.keeps_blocks`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from zinfer.nvme.aligned import align_up
from zinfer.offload.block import SlabTensor
from zinfer.weights.formats.gguf import SLICE_VALUES, BlockForm, decode, decode_pieces
from zinfer.weights.gguf_model import Recipe

_ALIGNMENT_BYTES: Final = 16
"""Of the tensors of blocks in a slab: no type has larger words."""
_WORKSPACE_BYTES: Final = 24 * SLICE_VALUES
"""Of decoding a range of rows: float32 values, codes and scales, and a copy in the dtype of products."""


@dataclass(frozen=True)
class SlabBlocks(SlabTensor):
    """The place of a parameter in a slab as blocks; ``dtype`` and ``shape`` are those that its module sees."""

    forms: tuple[BlockForm, ...] = field(kw_only=True)

    @property
    def nbytes(self) -> int:
        return sum(
            align_up(rows * row_bytes, _ALIGNMENT_BYTES) for form in self.forms for rows, row_bytes in form.sizes
        )

    @property
    def dequantized_bytes(self) -> int:
        """Bytes of what is decoded at once, in the dtype of products, and of decoding it."""
        whole = 0 if self.forms[0].is_by_rows and len(self.shape) < 3 else prod(self.shape[-2:])
        return whole * self.dtype.itemsize + min(_WORKSPACE_BYTES, 24 * self.numel)

    def parts(self) -> Iterator[SlabTensor]:
        """Yield the place of each tensor of blocks."""
        offset, number = self.offset, 0
        for form in self.forms:
            for size in form.sizes:
                part = SlabTensor(f"{self.name}.{number}", torch.uint8, size, offset)
                yield part
                offset, number = align_up(part.end, _ALIGNMENT_BYTES), number + 1

    def parameter(self, slab: torch.Tensor) -> "BlockParameter":
        return BlockParameter.make(self, [part.view(slab) for part in self.parts()])


class BlockParameter(nn.Parameter):
    """A parameter that consists of blocks; its shape and dtype are those that the module expects.

    Attributes:
        forms: of its pieces, one below the other.
        blocks: the tensors that these are made of, uint8 [rows, bytes of a row].
    """

    forms: tuple[BlockForm, ...]
    blocks: Sequence[torch.Tensor]

    @staticmethod
    def make(place: SlabBlocks, blocks: Sequence[torch.Tensor]) -> "BlockParameter":
        """Return a parameter that shares the blocks' memory."""
        made = torch.Tensor._make_wrapper_subclass(
            BlockParameter, place.shape, dtype=place.dtype, device=blocks[0].device
        )
        assert isinstance(made, BlockParameter)
        made.forms, made.blocks = place.forms, blocks
        return made

    def decoded(self) -> torch.Tensor:
        """Return the values in a new tensor."""
        values = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        decode_pieces(self.forms, values, self.blocks)
        return values

    def multiplied(self, input: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return ``input @ values.T + bias``, [..., rows], for ``input`` [..., columns]; a range of rows at a time."""
        form = self.forms[0]
        if len(self.forms) > 1 or not form.is_by_rows:
            return nn.functional.linear(input, self.decoded(), bias)
        out = input.new_empty(*input.shape[:-1], self.shape[0])
        for own in form.slices():
            values = form.rows(self.blocks[0], own, self.dtype)
            out[..., own] = nn.functional.linear(input, values, None if bias is None else bias[own])
        return out

    def looked_up(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows by their numbers, [..., columns]."""
        form = self.forms[0]
        if len(self.forms) > 1 or form.recipe is not Recipe.ROWS:
            return nn.functional.embedding(rows, self.decoded())
        values = decode(form.types[0], self.blocks[0].index_select(0, rows.flatten()), self.dtype)
        return values.view(*rows.shape, -1)

    def part(self, index: int) -> torch.Tensor:
        """Return the values of one of several stacked matrices, [rows, columns]."""
        count = self.shape[0]
        if not -count <= index < count:
            raise IndexError(f"index {index} is out of range for {count} matrices")
        index %= count
        if not self.forms[0].is_by_rows:
            return self.forms[0].one(self.blocks, index, self.dtype).contiguous()
        each = len(self.forms) // count
        own = slice(index * each, (index + 1) * each)
        values = torch.empty(self.shape[1:], dtype=self.dtype, device=self.device)
        decode_pieces(self.forms[own], values, self.blocks[own])
        return values

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        own = _OWN.get(func)
        result = own(*args, **(kwargs or {})) if own is not None else NotImplemented
        if result is not NotImplemented:
            return result
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch calls it with the class and the function
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten.detach.default:  # state_dict() detaches what it lists; the device may be full
            assert isinstance(args[0], BlockParameter)
            return args[0].decoded().cpu()
        full = tree_map_only(BlockParameter, BlockParameter.decoded, (tuple(args), dict(kwargs or {})))
        return func(*full[0], **full[1])


def _linear(input: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> Any:
    is_product = isinstance(weight, BlockParameter) and weight.dim() == 2 and not isinstance(input, BlockParameter)
    return weight.multiplied(input, bias) if is_product else NotImplemented


def _embedding(input: torch.Tensor, weight: Any, *args: Any, **options: Any) -> Any:
    return weight.looked_up(input) if isinstance(weight, BlockParameter) else NotImplemented


def _getitem(weight: Any, index: Any) -> Any:
    is_one_of_several = isinstance(weight, BlockParameter) and weight.dim() == 3
    if not is_one_of_several or not isinstance(index, int | torch.Tensor):
        return NotImplemented
    if isinstance(index, torch.Tensor) and (index.dim() or index.dtype == torch.bool):
        return NotImplemented
    return weight.part(int(index))


_OWN: dict[Callable[..., Any], Callable[..., Any]] = {
    nn.functional.linear: _linear,
    nn.functional.embedding: _embedding,
    torch.Tensor.__getitem__: _getitem,
}
