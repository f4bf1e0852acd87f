"""A layer's KV cache in pages, and the layout of a pass's sequences in them.

A page holds the keys and values of ``page_size`` successive tokens of one sequence, in 16 or 32 bits, or in INT8 or FP8
(e4m3) with a scale for each token and head: the largest magnitude divided by the largest code.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

KV_CODES: Final = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""Dtypes of codes, with the largest code of each."""


@dataclass(frozen=True, eq=False)
class KVPages:
    """One layer's pages.

    keys:   [pages, page_size, kv_heads, head_dim]
    values: [pages, page_size, kv_heads, value_dim]
    key_scales, value_scales: [pages, kv_heads, page_size] float32 if keys and values are codes, else None; a head's
            scales are contiguous, because a program of the attention kernels reads those of one head.
    values_in_keys: values are the first columns of keys, in the same memory (multi-head latent attention).
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None
    values_in_keys: bool = field(default=False, kw_only=True)

    @classmethod
    def empty(
        cls,
        num_pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        values_in_keys: bool = False,
    ) -> "KVPages":
        """Allocate memory for pages, uninitialized.

        Args:
            dtype: a floating-point dtype of 16 or 32 bits, or one of `KV_CODES`.
        """
        place = (num_pages, page_size, kv_heads)
        parts = [torch.empty((*place, head_dim), dtype=dtype, device=device)]
        if not values_in_keys:
            parts.append(torch.empty((*place, value_dim), dtype=dtype, device=device))
        if dtype in KV_CODES:
            scales = (num_pages, kv_heads, page_size)
            parts += [torch.empty(scales, dtype=torch.float32, device=device) for _ in range(len(parts))]
        return cls._of(parts, value_dim, values_in_keys)

    @classmethod
    def _of(cls, parts: Sequence[torch.Tensor], value_dim: int, values_in_keys: bool) -> "KVPages":
        """Make pages from the tensors of `parts`."""
        if not values_in_keys:
            return cls(*parts)
        keys, *scales = parts
        scale = scales[0] if scales else None
        return cls(keys, keys[..., :value_dim], scale, scale, values_in_keys=True)

    def beginning_at(self, page: int) -> "KVPages":
        """Return a view of the pages from ``page`` on."""
        return self._of([part[page:] for part in self.parts()], self.values.shape[3], self.values_in_keys)

    @property
    def page_size(self) -> int:
        return self.keys.shape[1]

    @property
    def is_flat(self) -> bool:
        """Whether the stride between tokens is constant in each part, across pages too, as the kernels require."""
        scales = [part for part in (self.key_scales, self.value_scales) if part is not None]
        return all(part.is_contiguous() for part in scales) and all(
            part.stride(0) == self.page_size * part.stride(1) and part.stride(3) == 1
            for part in (self.keys, self.values)
        )

    def parts(self) -> list[torch.Tensor]:
        """Return the tensors, each once, with pages as the first dimension."""
        if self.values_in_keys:
            return [self.keys] if self.key_scales is None else [self.keys, self.key_scales]
        return [part for part in (self.keys, self.values, self.key_scales, self.value_scales) if part is not None]


@dataclass(frozen=True, eq=False)
class PagedLayout:
    """The layout of a pass's tokens: a series of segments, each of successive tokens of one sequence, or of none.

    query_starts:    [segments + 1] int32, the start of each segment among the queries.
    context_lengths: [segments] int32, tokens of the sequence up to the segment's last one; its n queries are the last n
                     of them.
    page_table:      [segments, most pages] int32, the sequence's pages in the order of its tokens; entries before a
                     layer's window or beyond the context are not read and may be arbitrary.
    most_queries, most_context: the largest segment and the longest context.
    num_decodes: the number of segments with one query, which come first; None: unknown.
    """

    query_starts: torch.Tensor
    context_lengths: torch.Tensor
    page_table: torch.Tensor
    most_queries: int
    most_context: int
    num_decodes: int | None = None


def takes_kernels(pages: KVPages) -> bool:
    """Return whether the Triton kernels handle these pages: those on a GPU.

    Raises:
        ValueError: the GPU does not support the codes.
    """
    if pages.keys.device.type != "cuda":
        return False
    if pages.keys.dtype == torch.float8_e4m3fn and torch.cuda.get_device_capability(pages.keys.device) < (8, 9):
        raise ValueError("keys and values in FP8 need a GPU of compute capability 8.9 or more; take INT8")
    return True


def write_pages_ref(pages: KVPages, keys: torch.Tensor, values: torch.Tensor, places: torch.Tensor) -> None:
    """Write the keys and values of tokens into pages.

    Args:
        keys: [tokens, kv_heads, head_dim], any strides.
        values: [tokens, kv_heads, value_dim], any strides; not read if they are part of the keys.
        places: [tokens] int64, page * page_size + offset in the page; all distinct.
    """
    for target, scales, source in (
        (pages.keys, pages.key_scales, keys),
        (pages.values, pages.value_scales, values),
    )[: 1 if pages.values_in_keys else 2]:
        if scales is None:
            target.view(-1, *target.shape[2:])[places] = source.to(target.dtype)
        else:
            codes, found = _encode(source, target.dtype)
            target.view(torch.uint8).view(-1, *target.shape[2:])[places] = codes.view(torch.uint8)
            scales.transpose(1, 2)[places // pages.page_size, places % pages.page_size] = found


def read_pages_ref(pages: KVPages, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values of whole pages in float32, [pages * page_size, kv_heads, dim] each.

    Args:
        table: [pages] page numbers.
    """
    found = []
    for codes, scales in ((pages.keys, pages.key_scales), (pages.values, pages.value_scales)):
        taken = codes.view(torch.uint8)[table].view(codes.dtype) if codes.dtype in KV_CODES else codes[table]
        wide = taken.float()
        if scales is not None:
            wide *= scales[table].transpose(1, 2).unsqueeze(-1)
        found.append(wide.flatten(0, 1))
    return found[0], found[1]


def _encode(source: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes in the shape of ``source``, and scales [tokens, kv_heads]; a head of zeros has scale 0."""
    wide = source.float()
    scales = wide.abs().amax(dim=-1) / torch.tensor(KV_CODES[dtype], device=wide.device)
    codes = wide / torch.where(scales == 0, torch.ones_like(scales), scales).unsqueeze(-1)
    if dtype == torch.int8:
        codes = codes.round()
    largest = KV_CODES[dtype]
    return codes.clamp(-largest, largest).to(dtype), scales
