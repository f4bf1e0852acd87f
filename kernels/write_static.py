"""Appends the keys and values of a pass's tokens to a static cache, and counts them."""

from typing import Final

import torch
import triton
import triton.language as tl

from zinfer.kernels.launching import device_function, on_device

_TILE_ELEMENTS: Final = 4096
_WARPS: Final = 8


def write_static(
    keys: torch.Tensor,
    values: torch.Tensor,
    length: torch.Tensor,
    arrivals: torch.Tensor,
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
) -> None:
    """Write new keys and values after the first `length` places, as far as there is room, and update the length.

    By the Triton kernel: on a GPU, or on the CPU under Triton's interpreter.

    Args:
        keys: [batch, heads, places, dim], contiguous; values likewise, dim may differ.
        length: used places of every row, int64 scalar, on the same device; becomes that of all tokens.
        arrivals: int32 scalar, owned by these keys and values; zero before and after the call.
        new_keys: [batch, heads, tokens, dim], new_values likewise: any strides, in the dtype of keys and values.
    """
    batch, heads, tokens, head_dim = new_keys.shape
    value_dim = new_values.shape[3]
    assert (*keys.shape[:2], keys.shape[3]) == (batch, heads, head_dim)
    assert values.shape == (*keys.shape[:3], value_dim)
    assert keys.is_contiguous()
    assert values.is_contiguous()
    assert (new_keys.dtype, new_values.dtype) == (keys.dtype, values.dtype)
    rows = batch * heads * tokens
    if rows == 0:
        return
    columns = triton.next_power_of_2(max(head_dim, value_dim))
    block = max(1, _TILE_ELEMENTS // columns)
    programs = triton.cdiv(rows, block)
    with on_device(keys):
        _write_static_kernel[(programs,)](
            new_keys,
            new_values,
            keys,
            values,
            length,
            arrivals,
            tokens,
            rows,
            keys.shape[2],
            *new_keys.stride(),
            *new_values.stride(),
            HEADS=heads,
            HEAD_DIM=head_dim,
            VALUE_DIM=value_dim,
            KEY_COLUMNS=triton.next_power_of_2(head_dim),
            VALUE_COLUMNS=triton.next_power_of_2(value_dim),
            BLOCK=block,
            ALONE=programs == 1,
            num_warps=_WARPS,
        )


@device_function
def _read(  # type: ignore[no-untyped-def]
    source, batch, head, token, inside, batch_stride, head_stride, token_stride, column_stride,
    DIM: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Read some heads of some tokens, [rows, columns]."""
    column = tl.arange(0, COLUMNS)
    begin = batch.to(tl.int64) * batch_stride + head.to(tl.int64) * head_stride + token.to(tl.int64) * token_stride
    mask = inside[:, None] & (column < DIM)[None, :]
    return tl.load(source + begin[:, None] + column.to(tl.int64)[None, :] * column_stride, mask=mask, other=0)


@device_function
def _put(target, numbers, row, inside, DIM: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    column = tl.arange(0, COLUMNS)
    mask = inside[:, None] & (column < DIM)[None, :]
    tl.store(target + row[:, None] * DIM + column[None, :], numbers, mask=mask)


@triton.jit(do_not_specialize=["tokens", "rows"])
def _write_static_kernel(  # type: ignore[no-untyped-def]
    new_keys, new_values, keys, values, length, arrivals, tokens, rows, places,
    key_batch, key_head, key_token, key_column, value_batch, value_head, value_token, value_column,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_COLUMNS: tl.constexpr, VALUE_COLUMNS: tl.constexpr, BLOCK: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    """Write rows, each one head of one token.

    All programs read the length, and one updates it, which no program may read. So each program counts its arrival
    after
    reading, and the last one to arrive writes: the barrier orders the reads of all its threads before its arrival, and
    acquire and release order all arrivals before the write. A single program only waits for its own threads. Other
    readers of the length are launches before or after this one on the stream.
    """
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token, head, batch = row % tokens, row // tokens % HEADS, row // tokens // HEADS
    key = _read(
        new_keys, batch, head, token, row < rows,
        key_batch, key_head, key_token, key_column, HEAD_DIM, KEY_COLUMNS,
    )  # fmt: skip
    value = _read(
        new_values, batch, head, token, row < rows,
        value_batch, value_head, value_token, value_column, VALUE_DIM, VALUE_COLUMNS,
    )  # fmt: skip
    begin = tl.load(length)
    tl.debug_barrier()
    if ALONE:
        tl.store(length, begin + tokens)
    elif tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:
        tl.store(length, begin + tokens)
        tl.store(arrivals, 0)
    place = begin + token
    inside = (row < rows) & (place < places)  # after the last place is other memory
    target = (batch * HEADS + head).to(tl.int64) * places + place
    _put(keys, key, target, inside, HEAD_DIM, KEY_COLUMNS)
    _put(values, value, target, inside, VALUE_DIM, VALUE_COLUMNS)
