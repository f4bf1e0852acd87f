"""Turns queries and keys by their positions (Su et al. 2021, arXiv 2104.09864), both in one pass over memory."""

from typing import Final

import torch
import triton
import triton.language as tl

from zinfer.kernels.launching import is_dependent, let_next_begin, on_device, wait_for_others

_HEADS: Final = 64  # of a token, that a program holds at once
_WARPS: Final = 4


def rotate(
    queries: torch.Tensor, keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """``x * cos + turned(x) * sin`` for queries and keys: by the Triton kernel on a GPU, else and in float64 by
    `rotate_ref`.

    Args:
        queries, keys: [batch, heads, tokens, dim] each with heads of its own; dim is even.
        cos, sin: [batch or 1, tokens, dim].
        interleaved: neighbouring elements are a pair, (-x1, x0, -x3, x2, ...); otherwise those half a head apart.

    Returns:
        Both, as views in which the heads of a token lie beside each other, in their own dtypes.
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
        dependent = is_dependent(queries.device)
        with on_device(queries):
            _rotate_kernel[(tokens, batch)](
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
                COLUMNS=triton.next_power_of_2(dim),
                QUERY_BLOCK=min(_HEADS, triton.next_power_of_2(queries.shape[1])),
                KEY_BLOCK=min(_HEADS, triton.next_power_of_2(keys.shape[1])),
                INTERLEAVED=interleaved,
                IS_DEPENDENT=dependent,
                launch_pdl=dependent,
                num_warps=_WARPS,
            )
    rotated_queries, rotated_keys = (x.transpose(1, 2) for x in found)
    return rotated_queries, rotated_keys


@triton.jit
def _rotate_heads(  # type: ignore[no-untyped-def]
    source, target, cos, sin, column, partner, sign, head_stride, column_stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of one token."""
    for first in tl.static_range(0, HEADS, BLOCK):
        head = first + tl.arange(0, BLOCK)
        inside = (head < HEADS)[:, None] & (column < DIM)[None, :]
        begin = source + head[:, None].to(tl.int64) * head_stride
        x = tl.load(begin + column[None, :] * column_stride, mask=inside, other=0).to(tl.float32)
        other = tl.load(begin + partner[None, :] * column_stride, mask=inside, other=0).to(tl.float32)
        x = x * cos[None, :] + other * (sign * sin)[None, :]
        tl.store(target + head[:, None] * DIM + column[None, :], x.to(target.dtype.element_ty), mask=inside)


@triton.jit
def _rotate_kernel(  # type: ignore[no-untyped-def]
    queries, keys, cos_ptr, sin_ptr, query_out, key_out,
    query_batch, query_head, query_token, query_column, key_batch, key_head, key_token, key_column,
    cos_batch, cos_token, cos_column, sin_batch, sin_token, sin_column,
    QUERY_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr,
    QUERY_BLOCK: tl.constexpr, KEY_BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """A program turns all heads of one token."""
    let_next_begin(IS_DEPENDENT)
    wait_for_others(IS_DEPENDENT)
    token, batch = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    place = batch * tl.num_programs(0) + token
    column = tl.arange(0, COLUMNS)
    if INTERLEAVED:
        partner, is_first = column ^ 1, column % 2 == 0
    else:
        is_first = column < DIM // 2
        partner = tl.where(is_first, column + DIM // 2, column - DIM // 2)
    sign = tl.where(is_first, -1.0, 1.0)
    there = column < DIM
    cos = tl.load(cos_ptr + batch * cos_batch + token * cos_token + column * cos_column, mask=there, other=0)
    sin = tl.load(sin_ptr + batch * sin_batch + token * sin_token + column * sin_column, mask=there, other=0)
    cos, sin = cos.to(tl.float32), sin.to(tl.float32)
    _rotate_heads(
        queries + batch * query_batch + token * query_token, query_out + place * QUERY_HEADS * DIM,
        cos, sin, column, partner, sign, query_head, query_column, QUERY_HEADS, DIM, QUERY_BLOCK,
    )  # fmt: skip
    _rotate_heads(
        keys + batch * key_batch + token * key_token, key_out + place * KEY_HEADS * DIM,
        cos, sin, column, partner, sign, key_head, key_column, KEY_HEADS, DIM, KEY_BLOCK,
    )  # fmt: skip
