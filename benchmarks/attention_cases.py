"""Segments, pages and queries that the tests and benchmarks of paged attention share."""

from dataclasses import dataclass
from typing import Final

import torch

from zinfer.kernels.attention_arguments import AttentionRule
from zinfer.kernels.kv_pages import KV_CODES, KVPages, PagedLayout, write_pages_ref


@dataclass(frozen=True)
class AttentionCase:
    """A pass and a layer.

    Args:
        segments: queries and context of each; a context counts the queries.
        pages_dtype: of keys and values, None: as the queries.
        alibi, sinks: whether there are random ones.
        values_in_keys: as in `KVPages`.
    """

    segments: tuple[tuple[int, int], ...]
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    page_size: int = 64
    dtype: torch.dtype = torch.float16
    pages_dtype: torch.dtype | None = None
    window: int | None = None
    softcap: float | None = None
    alibi: bool = False
    sinks: bool = False
    values_in_keys: bool = False


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """What `paged_attention` takes."""

    query: torch.Tensor
    pages: KVPages
    layout: PagedLayout
    rule: AttentionRule


SMALL: Final = (
    AttentionCase(((1, 70), (1, 1), (40, 90)), 8, 2, 64, 64),
    AttentionCase(((1, 1300), (3, 600)), 7, 1, 80, 80, 16),
    AttentionCase(((1, 90), (1, 130), (9, 9)), 4, 4, 96, 112, 32, torch.bfloat16, torch.int8),
    AttentionCase(((1, 150), (20, 140)), 6, 2, 128, 128, 16, torch.float16, torch.int8, window=50, sinks=True),
    AttentionCase(((1, 100), (17, 17)), 4, 2, 256, 256, 128, torch.bfloat16, softcap=20.0, window=33),
    AttentionCase(((1, 33), (5, 40)), 3, 3, 192, 128, 16, torch.float32, alibi=True),
    AttentionCase(((1, 40), (2, 35)), 20, 1, 576, 512, 32, values_in_keys=True),
    AttentionCase(((1, 40), (3, 35)), 4, 1, 96, 64, 16, torch.float16, torch.int8, values_in_keys=True),
    AttentionCase(((1, 60), (7, 50)), 4, 1, 64, 64, 32, torch.float16, torch.float8_e4m3fn, alibi=True, sinks=True),
    AttentionCase(((1, 40), (5, 30)), 4, 2, 22, 6, 16, torch.float16, torch.int8),
)
"""Fast enough for an interpreter; each head dim, page size and rule occurs."""

LARGE: Final = (
    AttentionCase(tuple((1, 300 + 67 * row) for row in range(40)), 64, 8, 128, 128),
    AttentionCase(tuple((1, 513 + 31 * row) for row in range(24)), 56, 56, 128, 128, 128, torch.bfloat16),
    AttentionCase(((1, 20000), (1, 700), (1, 9), (700, 3000), (2048, 2048)), 64, 8, 128, 128),
    AttentionCase(((1, 9000), (300, 5000), (65, 65)), 16, 8, 256, 256, 64, torch.bfloat16, softcap=50.0, window=1024),
    AttentionCase(((1, 4000), (900, 2100)), 64, 8, 64, 64, 32, torch.bfloat16, window=128, sinks=True),
    AttentionCase(((1, 4000), (1, 77), (900, 2100)), 32, 8, 128, 128, 64, torch.float16, torch.int8),
    AttentionCase(((1, 4000), (1, 77), (900, 2100)), 32, 8, 128, 128, 16, torch.bfloat16, torch.int8),
    AttentionCase(((1, 4000), (1, 77), (900, 2100)), 32, 8, 128, 128, 64, torch.bfloat16, torch.float8_e4m3fn),
    AttentionCase(tuple((1, 540 + 31 * row) for row in range(24)), 56, 56, 128, 128, 64, torch.float16, torch.int8),
    AttentionCase(tuple((1, 540 + 31 * row) for row in range(24)), 64, 8, 128, 128, pages_dtype=torch.float8_e4m3fn),
    AttentionCase(((1, 4000), (900, 2100)), 64, 8, 64, 64, 32, torch.bfloat16, torch.int8, window=128, sinks=True),
    AttentionCase(((1, 4000), (1, 3), (900, 2100)), 32, 32, 80, 80, 64, torch.float16, torch.int8),
    AttentionCase(((1, 2000), (500, 1500)), 71, 1, 64, 64, 64, torch.bfloat16, alibi=True),
    AttentionCase(((1, 2000), (500, 1500)), 32, 32, 80, 80),
    AttentionCase(((1, 2000), (500, 1500)), 16, 16, 192, 128, 64, torch.bfloat16),
    AttentionCase(((1, 1500), (100, 900)), 128, 1, 576, 512, 64, torch.bfloat16, values_in_keys=True),
    AttentionCase(((1, 1500), (100, 900)), 128, 1, 576, 512, 64, torch.bfloat16, torch.int8, values_in_keys=True),
    AttentionCase(((1, 700), (90, 400)), 8, 2, 128, 128, 64, torch.float32),
)
"""What models do, for a GPU."""


def attention_call(case: AttentionCase, device: torch.device | str, gap: float = float("nan")) -> AttentionCall:
    """Random queries, and keys and values in pages taken at random; the queries are a view of [heads, tokens, dim].

    Args:
        gap: what lies in the scales or numbers of places that no query of the case sees; the table's entries for pages
            that nobody sees lead far out of the pages.
    """
    counts = [-(-length // case.page_size) for _, length in case.segments]
    order = torch.randperm(sum(counts)).tolist()
    table = torch.full((len(counts), max(counts) + 1), 1 << 30, dtype=torch.int32)
    dtype = case.pages_dtype or case.dtype
    place = (sum(counts), case.page_size, case.kv_heads, case.head_dim, case.value_dim)
    pages = KVPages.empty(*place, dtype, device, values_in_keys=case.values_in_keys)
    for part in pages.parts():
        part.view(torch.uint8).fill_(0x7F) if part.dtype in KV_CODES else part.fill_(gap)
    for row, ((queries, length), count) in enumerate(zip(case.segments, counts, strict=True)):
        own = torch.tensor([order.pop() for _ in range(count)])
        first = 0 if case.window is None else max(0, length - queries - case.window + 1)
        table[row, first // case.page_size : count] = own[first // case.page_size :]
        token = torch.arange(first, length)
        places = own[token // case.page_size] * case.page_size + token % case.page_size
        keys = torch.randn(length - first, case.kv_heads, case.head_dim, device=device).to(case.dtype)
        values = torch.randn(length - first, case.kv_heads, case.value_dim, device=device).to(case.dtype)
        write_pages_ref(pages, keys, values, places.to(device))
    lengths = torch.tensor([[queries, length] for queries, length in case.segments], dtype=torch.int32)
    starts = torch.zeros(len(counts) + 1, dtype=torch.int32)
    starts[1:] = lengths[:, 0].cumsum(0)
    layout = PagedLayout(
        starts.to(device),
        lengths[:, 1].contiguous().to(device),
        table.to(device),
        int(lengths[:, 0].max()),
        int(lengths[:, 1].max()),
    )
    query = torch.randn(case.heads, int(starts[-1]), case.head_dim, device=device).to(case.dtype).transpose(0, 1)
    rule = AttentionRule(
        case.head_dim**-0.5 * 2,
        case.window,
        case.softcap,
        torch.rand(case.heads, device=device) / 8 if case.alibi else None,
        torch.randn(case.heads, device=device).to(case.dtype) * 2 if case.sinks else None,
    )
    return AttentionCall(query, pages, layout, rule)
