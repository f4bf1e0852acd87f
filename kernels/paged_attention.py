"""Causal attention of a pass's tokens over paged keys and values of their own sequences."""

import torch

from zinfer.kernels.attention_arguments import AttentionRule
from zinfer.kernels.decode_attention import decode_attention
from zinfer.kernels.kv_pages import KVPages, PagedLayout, read_pages_ref, takes_kernels
from zinfer.kernels.padded_attention import padded_attention
from zinfer.kernels.prompt_attention import prompt_attention


def paged_attention(query: torch.Tensor, pages: KVPages, layout: PagedLayout, rule: AttentionRule) -> torch.Tensor:
    """As `paged_attention_ref`: on a GPU by the Triton kernels, on the CPU over padded groups.

    Raises:
        ValueError: as `takes_kernels`.
    """
    attend = paged_attention_kernel if takes_kernels(pages) else padded_attention
    return attend(query, pages, layout, rule)


def paged_attention_kernel(
    query: torch.Tensor, pages: KVPages, layout: PagedLayout, rule: AttentionRule
) -> torch.Tensor:
    """As `paged_attention`, by the Triton kernels: on a GPU, or on the CPU under Triton's interpreter.

    The same arguments give the same bits, and a segment's result does not depend on the other segments. The host reads
    no value of the layout's tensors.
    """
    if query.stride(2) != 1:
        query = query.contiguous()
    out = torch.empty((*query.shape[:2], pages.values.shape[3]), dtype=query.dtype, device=query.device)
    segments = layout.context_lengths.shape[0]
    if layout.num_decodes != 0:
        decode_attention(query, pages, layout, rule, out)
    if layout.most_queries > 1 and layout.num_decodes != segments:
        prompt_attention(query, pages, layout, rule, out)
    return out


def paged_attention_ref(query: torch.Tensor, pages: KVPages, layout: PagedLayout, rule: AttentionRule) -> torch.Tensor:
    """Return attention in plain torch, computed in float32, a segment at a time: what the others are tested with.

    Args:
        query: [tokens, heads, head_dim], any strides; heads are a multiple of kv_heads, neighbours share one.
        pages: the keys and values of these tokens are already written.

    Returns:
        [tokens, heads, value_dim] in the query's dtype.
    """
    out = query.new_empty((*query.shape[:2], pages.values.shape[3]))
    starts, lengths = layout.query_starts.tolist(), layout.context_lengths.tolist()
    for row, (begin, end, length) in enumerate(zip(starts, starts[1:], lengths, strict=False)):
        if end > begin:
            out[begin:end] = _segment(query[begin:end], pages, layout.page_table[row], length, rule)
    return out


def _segment(
    query: torch.Tensor, pages: KVPages, table: torch.Tensor, length: int, rule: AttentionRule
) -> torch.Tensor:
    """Return the attention of one segment, [queries, heads, value_dim] float32."""
    num_queries, heads, _ = query.shape
    first_seen = 0 if rule.window is None else max(0, length - num_queries - rule.window + 1)
    first_page, last_page = first_seen // pages.page_size, -(-length // pages.page_size)
    keys, values = read_pages_ref(pages, table[first_page:last_page].long())
    seen = slice(first_seen % pages.page_size, length - first_page * pages.page_size)
    keys, values = keys[seen], values[seen]
    shared = heads // keys.shape[1]
    # [kv_heads, shared * queries, dim] times [kv_heads, dim, keys]: no key or value is repeated.
    grouped = query.float().view(num_queries, -1, shared, query.shape[2]).permute(1, 2, 0, 3).flatten(1, 2)
    scores = (grouped @ keys.permute(1, 2, 0)).mul_(rule.scale).view(heads, num_queries, -1)
    if rule.softcap is not None:
        scores = torch.tanh(scores / rule.softcap) * rule.softcap
    key_place = torch.arange(first_seen, length, device=query.device)
    distance = torch.arange(length - num_queries, length, device=query.device)[:, None] - key_place
    if rule.alibi_slopes is not None:
        scores = scores - rule.alibi_slopes.float()[:, None, None] * distance
    hidden = distance < 0
    if rule.window is not None:
        hidden |= distance >= rule.window
    scores = scores.masked_fill(hidden, -torch.inf)
    if rule.sinks is not None:
        scores = torch.cat([scores, rule.sinks.float()[:, None, None].expand(heads, num_queries, 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : len(key_place)]
    found = weights.view(-1, shared * num_queries, weights.shape[2]) @ values.permute(1, 0, 2)
    return found.view(heads, num_queries, -1).transpose(0, 1)
