"""Writes the keys and values of a pass's tokens into pages, quantizing them if pages hold codes."""

from typing import Final

import torch
import triton
import triton.language as tl

from zinfer.kernels.kv_pages import KVPages, takes_kernels, write_pages_ref
from zinfer.kernels.launching import (
    COMPILED,
    dependent_options,
    device_function,
    grid_dependency_wait,
    launch_dependents,
    on_device,
)

_TILE_ELEMENTS: Final = 4096
_WARPS: Final = 4


def write_pages(pages: KVPages, keys: torch.Tensor, values: torch.Tensor, places: torch.Tensor) -> None:
    """As `write_pages_ref`: on a GPU by the Triton kernel, on the CPU by the reference.

    Raises:
        ValueError: as `takes_kernels`.
    """
    if takes_kernels(pages):
        write_pages_kernel(pages, keys, values, places)
    else:
        write_pages_ref(pages, keys, values, places)


def write_pages_kernel(pages: KVPages, keys: torch.Tensor, values: torch.Tensor, places: torch.Tensor) -> None:
    """As `write_pages_ref`, bit for bit, by the Triton kernel: on a GPU, or on the CPU under Triton's interpreter."""
    tokens, kv_heads, head_dim = keys.shape
    value_dim = values.shape[2]
    assert places.shape == (tokens,)
    assert pages.keys.shape[2:] == (kv_heads, head_dim)
    assert pages.values.shape[2:] == (kv_heads, value_dim)
    assert pages.is_flat, "pages beside each other"
    if tokens == 0:
        return
    columns = triton.next_power_of_2(max(head_dim, value_dim))
    rows = max(1, _TILE_ELEMENTS // columns)
    with on_device(keys):
        _write_kernel[(triton.cdiv(tokens * kv_heads, rows),)](
            keys,
            None if pages.values_in_keys else values,
            pages.keys,
            pages.values,
            pages.key_scales,
            pages.value_scales,
            places,
            tokens,
            *keys.stride(),
            *values.stride(),
            *pages.keys.stride()[1:3],
            *pages.values.stride()[1:3],
            KV_HEADS=kv_heads,
            PAGE_SIZE=pages.page_size,
            HEAD_DIM=head_dim,
            VALUE_DIM=value_dim,
            KEY_COLUMNS=triton.next_power_of_2(head_dim),
            VALUE_COLUMNS=triton.next_power_of_2(value_dim),
            ROWS=rows,
            **dependent_options(keys.device),
            num_warps=_WARPS,
        )


@device_function
def _rounded_to_e4m3(wide):  # type: ignore[no-untyped-def]
    """Round to the nearest e4m3 numbers, ties to even, in float32: the interpreter's conversion drops the carry."""
    power = (wide.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    # Add and subtract a number whose last float32 bit is e4m3's last bit at this magnitude; constant below 2**-6.
    magic = tl.maximum(power, 0.015625) * (1.5 * 2.0**20)
    near = (tl.abs(wide) + magic) - magic
    return tl.where(wide < 0, -near, near)


@device_function
def _write(  # type: ignore[no-untyped-def]
    source, target, scales, token, place, head, inside,
    token_stride, head_stride, column_stride, place_stride, place_head,
    KV_HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write some heads of some tokens, [rows, columns]."""
    column = tl.arange(0, COLUMNS)
    mask = inside[:, None] & (column < DIM)[None, :]
    begin = token.to(tl.int64) * token_stride + head.to(tl.int64) * head_stride
    numbers = tl.load(source + begin[:, None] + column[None, :] * column_stride, mask=mask, other=0)
    target_ptrs = target + (place * place_stride + head * place_head)[:, None] + column[None, :]
    if scales is None:
        tl.store(target_ptrs, numbers.to(target.dtype.element_ty), mask=mask)
    else:
        is_whole: tl.constexpr = target.dtype.element_ty == tl.int8
        largest: tl.constexpr = 127.0 if is_whole else 448.0
        wide = numbers.to(tl.float32)
        scale = tl.div_rn(tl.max(tl.abs(wide), axis=1), largest)
        of_head = (place // PAGE_SIZE * KV_HEADS + head) * PAGE_SIZE
        tl.store(scales + of_head + place % PAGE_SIZE, scale, mask=inside)
        codes = tl.div_rn(wide, tl.where(scale == 0, 1.0, scale)[:, None] + tl.zeros_like(wide))
        if is_whole:
            codes = (codes + 12582912.0) - 12582912.0  # 1.5 * 2**23: float32 has no fraction bits there
        elif not COMPILED:
            codes = _rounded_to_e4m3(codes)
        codes = tl.minimum(tl.maximum(codes, -largest), largest)
        tl.store(target_ptrs, codes.to(target.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def _write_kernel(  # type: ignore[no-untyped-def]
    keys, values, key_pages, value_pages, key_scales, value_scales, places, tokens,
    key_token, key_head, key_column, value_token, value_head, value_column,
    key_place, key_place_head, value_place, value_place_head,
    KV_HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_COLUMNS: tl.constexpr, VALUE_COLUMNS: tl.constexpr, ROWS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Write rows, each one head of one token."""
    launch_dependents(IS_DEPENDENT)
    grid_dependency_wait(IS_DEPENDENT)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token, head = row // KV_HEADS, row % KV_HEADS
    inside = token < tokens
    place = tl.load(places + token, mask=inside, other=0).to(tl.int64)
    _write(
        keys, key_pages, key_scales, token, place, head, inside,
        key_token, key_head, key_column, key_place, key_place_head,
        KV_HEADS, PAGE_SIZE, HEAD_DIM, KEY_COLUMNS,
    )  # fmt: skip
    if values is not None:
        _write(
            values, value_pages, value_scales, token, place, head, inside,
            value_token, value_head, value_column, value_place, value_place_head,
            KV_HEADS, PAGE_SIZE, VALUE_DIM, VALUE_COLUMNS,
        )  # fmt: skip
