"""Rotary position embeddings of queries and keys (Su et al. 2021, arXiv 2104.09864), in one pass over memory."""

from typing import Final

import torch
import triton
import triton.language as tl

from zinfer.kernels.launching import (
    dependent_options,
    device_function,
    grid_dependency_wait,
    launch_dependents,
    on_device,
)

_HEADS: Final = 64  # of a token, in a program
_WARPS: Final = 4


def rotate(
    queries: torch.Tensor, keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``x * cos + turned(x) * sin`` for queries and keys: by the Triton kernel on a GPU, else and in float64 by
    `rotate_ref`.

    Args:
        queries, keys: [batch, heads, tokens, dim]; the number of heads may differ; dim is even.
        cos, sin: [batch or 1, tokens, dim].
        interleaved: neighbouring elements are a pair, (-x1, x0, -x3, x2, ...); otherwise those half a head apart.

    Returns:
        Both, as views in which the heads of a token are adjacent in memory, in their own dtypes.
    """
    kernel = rotate_kernel if queries.device.type == "cuda" and queries.dtype != torch.float64 else rotate_ref
    return kernel(queries, keys, cos, sin, interleaved=interleaved)


def rotate_ref(
    queries: torch.Tensor, keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `rotate`, in float32, or in float64 for float64."""
    wide = torch.promote_types(queries.dtype, torch.float32)
    cos, sin = cos.to(wide)[:, None], sin.to(wide)[:, None]

    def turned(x: torch.Tensor) -> torch.Tensor:
        if interleaved:
            return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)
        half = x.shape[-1] // 2
        return torch.cat((-x[..., half:], x[..., :half]), dim=-1)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        return (x.to(wide) * cos + turned(x.to(wide)) * sin).to(x.dtype)

    return rotated(queries), rotated(keys)


def rotate_kernel(
    queries: torch.Tensor, keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `rotate`, by the Triton kernel: on a GPU, or on the CPU under Triton's interpreter."""
    batch, _, tokens, dim = queries.shape
    assert keys.shape[0] == batch
    assert keys.shape[2:] == (tokens, dim)
    assert dim % 2 == 0
    cos, sin = cos.expand(batch, tokens, dim), sin.expand(batch, tokens, dim)
    found = [torch.empty((batch, tokens, x.shape[1], dim), dtype=x.dtype, device=x.device) for x in (queries, keys)]
    if tokens * batch:
        with on_device(queries):
            _rotate_kernel[(tokens, batch, triton.cdiv(max(queries.shape[1], keys.shape[1]), _HEADS))](
                queries,
                keys,
                cos,
                sin,
                *found,
                *queries.stride(),
                *keys.stride(),
                *cos.stride(),
                *sin.stride(),
                QUERY_HEADS=queries.shape[1],
                KEY_HEADS=keys.shape[1],
                DIM=dim,
                PAIRS=triton.next_power_of_2(dim // 2),
                QUERY_BLOCK=min(_HEADS, triton.next_power_of_2(queries.shape[1])),
                KEY_BLOCK=min(_HEADS, triton.next_power_of_2(keys.shape[1])),
                INTERLEAVED=interleaved,
                **dependent_options(queries.device),
                num_warps=_WARPS,
            )
    rotated_queries, rotated_keys = (x.transpose(1, 2) for x in found)
    return rotated_queries, rotated_keys


@device_function
def _load_pairs(  # type: ignore[no-untyped-def]
    source, head, pair, head_stride, column_stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Load the first and the second element of each pair, [heads, pairs]; splits interleaved pairs."""
    begin = source + head[:, None].to(tl.int64) * head_stride
    if INTERLEAVED:
        column = tl.arange(0, 2 * pair.shape[0])
        inside = (head < HEADS)[:, None] & (column < DIM)[None, :]
        both = tl.load(begin + column[None, :] * column_stride, mask=inside, other=0)
        first, second = tl.split(both.reshape(head.shape[0], pair.shape[0], 2))
    else:
        inside = (head < HEADS)[:, None] & (pair < DIM // 2)[None, :]
        first = tl.load(begin + pair[None, :] * column_stride, mask=inside, other=0)
        second = tl.load(begin + (pair + DIM // 2)[None, :] * column_stride, mask=inside, other=0)
    return first.to(tl.float32), second.to(tl.float32)


@device_function
def _store_pairs(  # type: ignore[no-untyped-def]
    target, first, second, head, pair,
    HEADS: tl.constexpr, DIM: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Store pairs in the layout of `_load_pairs`, with adjacent heads."""
    first, second = first.to(target.dtype.element_ty), second.to(target.dtype.element_ty)
    if INTERLEAVED:
        column = tl.arange(0, 2 * pair.shape[0])
        inside = (head < HEADS)[:, None] & (column < DIM)[None, :]
        both = tl.join(first, second).reshape(head.shape[0], 2 * pair.shape[0])
        tl.store(target + head[:, None] * DIM + column[None, :], both, mask=inside)
    else:
        inside = (head < HEADS)[:, None] & (pair < DIM // 2)[None, :]
        begin = target + head[:, None] * DIM + pair[None, :]
        tl.store(begin, first, mask=inside)
        tl.store(begin + DIM // 2, second, mask=inside)


@triton.jit
def _rotate_kernel(  # type: ignore[no-untyped-def]
    queries, keys, cos_ptr, sin_ptr, query_out, key_out,
    query_batch, query_head, query_token, query_column, key_batch, key_head, key_token, key_column,
    cos_batch, cos_token, cos_column, sin_batch, sin_token, sin_column,
    QUERY_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, DIM: tl.constexpr, PAIRS: tl.constexpr,
    QUERY_BLOCK: tl.constexpr, KEY_BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Rotate some heads of one token. All loads, queries first, are issued before any is waited for."""
    launch_dependents(IS_DEPENDENT)
    grid_dependency_wait(IS_DEPENDENT)
    token, batch = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    place = batch * tl.num_programs(0) + token
    pair = tl.arange(0, PAIRS)
    head = tl.program_id(2) * QUERY_BLOCK + tl.arange(0, QUERY_BLOCK)
    key_number = tl.program_id(2) * KEY_BLOCK + tl.arange(0, KEY_BLOCK)
    source = queries + batch * query_batch + token * query_token
    x, y = _load_pairs(source, head, pair, query_head, query_column, QUERY_HEADS, DIM, INTERLEAVED)
    source = keys + batch * key_batch + token * key_token
    key_x, key_y = _load_pairs(source, key_number, pair, key_head, key_column, KEY_HEADS, DIM, INTERLEAVED)
    one = tl.arange(0, 1)  # a token has one row of cosines, which all heads share
    cos_x, cos_y = _load_pairs(
        cos_ptr + batch * cos_batch + token * cos_token, one, pair, 0, cos_column, 1, DIM, INTERLEAVED
    )
    sin_x, sin_y = _load_pairs(
        sin_ptr + batch * sin_batch + token * sin_token, one, pair, 0, sin_column, 1, DIM, INTERLEAVED
    )
    target = query_out + place * QUERY_HEADS * DIM
    _store_pairs(target, x * cos_x - y * sin_x, y * cos_y + x * sin_y, head, pair, QUERY_HEADS, DIM, INTERLEAVED)
    x, y = key_x, key_y
    target = key_out + place * KEY_HEADS * DIM
    _store_pairs(target, x * cos_x - y * sin_x, y * cos_y + x * sin_y, key_number, pair, KEY_HEADS, DIM, INTERLEAVED)
