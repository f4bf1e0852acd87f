"""Arguments of both attention kernels: a layer's rule, and the kernel arguments for pages, layout and rule."""

from dataclasses import dataclass
from typing import Any, Final

import torch
import triton

from zinfer.kernels.kv_pages import KV_CODES, KVPages, PagedLayout

_LOG2_E: Final = 1.4426950408889634
_LEAST_DIM: Final = 16  # of a tensor core's operand
_WORD: Final = 4  # codes


@dataclass(frozen=True, eq=False)
class AttentionRule:
    """How a layer computes attention weights.

    Args:
        scale: factor of the products; above 0.
        window: each token sees this many of the last tokens, including itself; None: all.
        softcap: products become ``softcap * tanh(products / softcap)`` (Gemma 2); None: unchanged.
        alibi_slopes: [heads] float32; slope times distance to the key is subtracted (Press et al. 2022); None: nothing.
        sinks: [heads], an additional product per query whose weight has no value (gpt-oss); None: none.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None


def words_fit(pages: KVPages, dtype: torch.dtype) -> bool:
    """Return whether codes in pages can be read as words of four, for tensor cores with queries of ``dtype``."""
    parts = (pages.keys, pages.values)
    return (
        pages.keys.dtype in KV_CODES
        and dtype != torch.float32
        and all(
            part.data_ptr() % _WORD == 0 and all(number % _WORD == 0 for number in (part.shape[3], *part.stride()[:3]))
            for part in parts
        )
    )


def tile_arguments(
    query: torch.Tensor, pages: KVPages, layout: PagedLayout, rule: AttentionRule, words: bool
) -> dict[str, Any]:
    """Return the arguments that both kernels take, by name.

    `factor` converts products (with a softcap or slopes, finished ones) to exponents of two.

    Args:
        words: whether codes are read as words.
    """
    heads, head_dim = query.shape[1:]
    kv_heads, value_dim = pages.values.shape[2:]
    assert heads % kv_heads == 0, "neighbouring heads share one of keys"
    assert head_dim == pages.keys.shape[3], "queries as wide as keys"
    assert rule.scale > 0, "products in the order of their weights"
    assert triton.next_power_of_2(pages.page_size) == pages.page_size, "pages of a power of two"
    assert query.dtype == pages.keys.dtype or pages.keys.dtype in KV_CODES, "keys like queries, or codes"
    assert pages.is_flat, "pages beside each other"
    keys, values = (part.view(torch.int32) if words else _bits(part) for part in (pages.keys, pages.values))
    columns = keys.shape[3]
    main = max(_LEAST_DIM, triton.next_power_of_2(columns) if words else 1 << columns.bit_length() - 1)
    finished = rule.softcap is not None or rule.alibi_slopes is not None
    return {
        "query": query,
        "starts": layout.query_starts,
        "lengths": layout.context_lengths,
        "table": layout.page_table,
        "keys": keys,
        "values": values,
        "key_scales": pages.key_scales,
        "value_scales": pages.value_scales,
        "slopes": rule.alibi_slopes,
        "sinks": rule.sinks,
        "query_token": query.stride(0),
        "query_head": query.stride(1),
        "table_row": layout.page_table.stride(0),
        "scale": rule.scale,
        "factor": _LOG2_E if finished else rule.scale * _LOG2_E,
        "softcap": rule.softcap,
        "window": rule.window,
        # Constants, so that the compiler knows which of their multiples are aligned for whole copies.
        "KEY_TOKEN": keys.stride(1),
        "KEY_HEAD": keys.stride(2),
        "VALUE_TOKEN": values.stride(1),
        "VALUE_HEAD": values.stride(2),
        "KV_HEADS": kv_heads,
        "SHARED": heads // kv_heads,
        "HEAD_DIM": head_dim,
        "VALUE_DIM": value_dim,
        "MAIN": main,
        "REST": max(_LEAST_DIM, triton.next_power_of_2(columns - main)) if columns > main else 0,
        "COLUMNS": max(_LEAST_DIM, triton.next_power_of_2(values.shape[3])),
        "PAGE_SIZE": pages.page_size,
        "IS_FLOAT": pages.keys.dtype == torch.float8_e4m3fn,
        "WORDS": words,
        "LEVELS": pages.value_scales is not None and query.dtype == torch.float16,
    }


def _bits(codes: torch.Tensor) -> torch.Tensor:
    """View e4m3 numbers as bits, since a masked load needs a zero of the dtype; return others unchanged."""
    return codes.view(torch.uint8) if codes.dtype == torch.float8_e4m3fn else codes
