"""Paged attention on a CPU: blocks of queries of many sequences at once, padded to the largest of a group.

[Note: padded groups]
A segment's queries are cut into blocks. Blocks of alike numbers of queries and of keys form a group, whose products are
those of one batch. What pads a block repeats its last query and its last key, which no query sees twice: the values of
another sequence, of unwritten places or of unread page numbers never enter a product. A group gathers as many keys and
values as its workspace holds. Only a block that exceeds it alone takes several steps, which are joined as in
FlashAttention (Dao et al. 2022): products are summed relative to the largest so far.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final
from weakref import WeakKeyDictionary

import torch

from zinfer.kernels.attention_arguments import AttentionRule
from zinfer.kernels.kv_pages import KV_CODES, KVPages, PagedLayout

_FLOAT_BYTES: Final = 4
_MOST_ELEMENTS: Final = 1 << 21  # of a workspace, in float32: it stays in a processor's caches, and hides Python's time
_TOKENS_OF_WIDTH: Final = 512  # of all heads, in the workspace of a small model
_MOST_QUERIES: Final = 128  # of a block: gathering its keys then takes a fraction of the time of its products
_FEW_KEYS: Final = 64  # contexts up to these are alike: operators take longer to start than to pad
_ELEMENTS_A_PAIR: Final = 4  # distance, its comparisons and its conversion, per query and key
_HIDDEN: Final = -1e30  # finite: the exponent of the difference of two of them is a number


@dataclass(frozen=True)
class _Shape:
    """What a layer's blocks are cut and grouped by."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    page_size: int = 1
    window: int | None = None

    @property
    def workspace(self) -> int:
        """Elements of a group's queries and sums, and likewise of what a step takes."""
        width = self.query_elements + self.kv_heads * (self.head_dim + self.value_dim)
        return min(_MOST_ELEMENTS, _TOKENS_OF_WIDTH * width)

    @property
    def query_elements(self) -> int:
        """Elements of a query, its sums, and their copy in the order of heads."""
        return self.heads * (self.head_dim + 2 * self.value_dim)

    @property
    def most_queries(self) -> int:
        """Maximum queries of a block: a power of two."""
        fitting = max(1, self.workspace // self.query_elements)
        return min(_MOST_QUERIES, 1 << fitting.bit_length() - 1)

    def key_elements(self, num_queries: int) -> int:
        """Elements of a key, its value, and its products with a block's queries."""
        return self.kv_heads * (self.head_dim + self.value_dim) + num_queries * (self.heads + _ELEMENTS_A_PAIR)

    def blocks_at_once(self, num_queries: int, num_keys: int) -> int:
        """Return how many blocks of at most so many queries and keys fit the workspace; at least one."""
        by_queries = self.workspace // (num_queries * self.query_elements)
        return max(1, min(by_queries, self.workspace // (num_keys * self.key_elements(num_queries))))

    def step(self, num_blocks: int, num_queries: int) -> int:
        """Return how many keys of each block fit the workspace."""
        return max(1, self.workspace // (num_blocks * self.key_elements(num_queries)))


@dataclass(frozen=True, eq=False)
class _Group:
    """Blocks that are computed together.

    queries:   [blocks * most queries] int64, the index of each query in the pass.
    real:      [queries without padding] int64, places of the real ones among `queries`; None: all are.
    positions: [blocks, most queries] int64, where each query is in its sequence.
    first, last: [blocks, 1] int64, the first key that a block sees, and its last one.
    table:     [blocks, pages] int64, pages of the blocks' sequences.
    num_keys:  of the block that sees most.
    """

    queries: torch.Tensor
    real: torch.Tensor | None
    positions: torch.Tensor
    first: torch.Tensor
    last: torch.Tensor
    table: torch.Tensor
    num_keys: int


_groups_of: WeakKeyDictionary[PagedLayout, dict[_Shape, list[_Group]]] = WeakKeyDictionary()
"""Groups of the layouts that are in use: a pass's layers share them."""


def padded_attention_bytes(heads: int, kv_heads: int, head_dim: int, value_dim: int) -> int:
    """Return a bound of what `padded_attention` allocates besides its result and its lists of blocks.

    It is a workspace of queries and their sums, one of a step's keys, values and products, and one for temporaries.
    """
    return 3 * _FLOAT_BYTES * _Shape(heads, kv_heads, head_dim, value_dim).workspace


def padded_attention(query: torch.Tensor, pages: KVPages, layout: PagedLayout, rule: AttentionRule) -> torch.Tensor:
    """As `paged_attention_ref`, over padded groups; see [Note: padded groups].

    The layout's tensors must keep their values while the layout is in use.
    """
    out = query.new_empty((*query.shape[:2], pages.values.shape[3]))
    kv_heads, head_dim = pages.keys.shape[2:]
    shape = _Shape(query.shape[1], kv_heads, head_dim, pages.values.shape[3], pages.page_size, rule.window)
    groups = _groups_of.setdefault(layout, {})
    if shape not in groups:
        groups[shape] = list(_grouped(layout, shape))
    for group in groups[shape]:
        found = _attend(query, pages, group, shape, rule)
        if group.real is None:
            out[group.queries] = found.to(out.dtype)
        else:
            out[group.queries[group.real]] = found[group.real].to(out.dtype)
    return out


def _grouped(layout: PagedLayout, shape: _Shape) -> Iterator[_Group]:
    """Cut the layout's segments into blocks, and yield them in groups."""
    starts = layout.query_starts.long()
    sizes, most = starts.diff(), shape.most_queries
    counts = -(-sizes // most)
    rows = torch.arange(len(sizes)).repeat_interleave(counts)
    begins = starts[rows] + most * (torch.arange(len(rows)) - (counts.cumsum(0) - counts)[rows])
    ends = torch.minimum(begins + most, starts[rows + 1])
    stops = layout.context_lengths.long()[rows] - (starts[rows + 1] - ends)
    firsts = torch.zeros_like(stops)
    if shape.window is not None:
        firsts = (stops - (ends - begins) - shape.window + 1).clamp(min=0)
    blocks = torch.stack([rows, begins, ends, firsts, stops])
    num_queries, num_keys = ends - begins, stops - firsts
    kinds = _bits(num_queries) * 64 + _bits(num_keys.clamp(min=_FEW_KEYS))
    order = num_keys.argsort(descending=True, stable=True)
    order = order[kinds[order].argsort(stable=True)]
    borders = kinds[order].diff().nonzero().view(-1) + 1
    begin = 0
    for end in (*borders.tolist(), len(order)):
        if begin == end:
            continue
        most_queries = int(num_queries[order[begin:end]].max())
        while begin < end:
            at_once = shape.blocks_at_once(most_queries, int(num_keys[order[begin]]))
            yield _group(blocks[:, order[begin : min(begin + at_once, end)]], layout, shape)
            begin = min(begin + at_once, end)


def _bits(numbers: torch.Tensor) -> torch.Tensor:
    """Return exponents of the smallest powers of two that reach the numbers, which are below 2**53."""
    return numbers.double().log2().ceil().long()


def _group(blocks: torch.Tensor, layout: PagedLayout, shape: _Shape) -> _Group:
    """Pad blocks, given by their rows among the segments, begins and ends of queries, first keys, and ends of keys."""
    rows, begins, ends, firsts, stops = blocks[..., None]
    sizes = ends - begins
    most = int(sizes.max())
    queries = begins + torch.arange(most)
    real = None if int(sizes.min()) == most else (queries < ends).view(-1).nonzero().view(-1)
    queries = torch.minimum(queries, ends - 1)
    num_pages = -(-int(stops.max()) // shape.page_size)
    return _Group(
        queries.view(-1),
        real,
        stops - (ends - queries),
        firsts,
        stops - 1,
        layout.page_table[rows[:, 0], :num_pages].long(),
        int((stops - firsts).max()),
    )


def _attend(query: torch.Tensor, pages: KVPages, group: _Group, shape: _Shape, rule: AttentionRule) -> torch.Tensor:
    """Return the attention of a group's queries, [blocks * most queries, heads, value_dim] float32."""
    num_blocks, num_queries = group.positions.shape
    shared = shape.heads // shape.kv_heads
    split = (num_blocks, num_queries, shape.kv_heads, shared)
    # [blocks, kv_heads, shared * queries, dim] times [blocks, kv_heads, dim, keys]: no key or value is repeated.
    grouped = query[group.queries].float().mul_(rule.scale).view(*split, -1).permute(0, 2, 3, 1, 4).flatten(2, 3)
    places = (num_blocks, shape.kv_heads, shared * num_queries)
    top, total, sums = grouped.new_full((*places, 1), _HIDDEN), grouped.new_zeros(()), grouped.new_zeros(())
    if rule.sinks is not None:
        sinks = rule.sinks.float().view(1, shape.kv_heads, shared, 1).expand(num_blocks, -1, -1, num_queries)
        top, total = sinks.reshape(*places, 1), grouped.new_ones(())
    step = shape.step(num_blocks, num_queries)
    for begin in range(0, group.num_keys, step):
        seen = group.first + torch.arange(begin, min(begin + step, group.num_keys))
        keys, values = _gathered(pages, _tokens(seen, group, shape))
        scores = grouped @ keys.transpose(2, 3)
        _apply(rule, scores.view(num_blocks, shape.heads, num_queries, -1), group.positions, seen)
        largest = torch.maximum(top, scores.amax(dim=-1, keepdim=True))
        weights = scores.sub_(largest).exp_()
        faded = (top - largest).exp_()
        total = total * faded + weights.sum(dim=-1, keepdim=True)
        sums = torch.addcmul(weights @ values, sums, faded)
        top = largest
    sums = sums.div_(total).view(num_blocks, shape.heads, num_queries, -1)
    return sums.transpose(1, 2).flatten(0, 1)


def _apply(rule: AttentionRule, scores: torch.Tensor, positions: torch.Tensor, seen: torch.Tensor) -> None:
    """Cap, bias and hide products [blocks, heads, queries, keys] of queries at ``positions`` with keys at ``seen``."""
    if rule.softcap is not None:
        scores.div_(rule.softcap).tanh_().mul_(rule.softcap)
    distance = (positions[:, :, None] - seen[:, None])[:, None]
    if rule.alibi_slopes is not None:
        scores.addcmul_(rule.alibi_slopes.float()[:, None, None], distance.float(), value=-1)
    hidden = distance < 0
    if rule.window is not None:
        hidden |= distance >= rule.window
    scores.masked_fill_(hidden, _HIDDEN)


def _tokens(seen: torch.Tensor, group: _Group, shape: _Shape) -> torch.Tensor:
    """Return where keys [blocks, keys] lie among the tokens of all pages; those behind a block's last repeat it."""
    seen = torch.minimum(seen, group.last)
    places = seen % shape.page_size
    return group.table.gather(1, (seen - places) // shape.page_size) * shape.page_size + places


def _gathered(pages: KVPages, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values of tokens [blocks, tokens] in float32, [blocks, kv_heads, tokens, dim] each."""
    kv_heads, page_size = pages.keys.shape[2], pages.page_size
    head = torch.arange(kv_heads)[:, None]
    rows = tokens[:, None] * kv_heads + head
    scale_rows = None
    if pages.key_scales is not None:
        places = tokens % page_size
        scale_rows = ((tokens - places)[:, None] * kv_heads) + head * page_size + places[:, None]
    keys = _rows(pages.keys, pages.key_scales, rows, scale_rows)
    if pages.values_in_keys:
        return keys, keys[..., : pages.values.shape[3]]
    return keys, _rows(pages.values, pages.value_scales, rows, scale_rows)


def _rows(
    codes: torch.Tensor, scales: torch.Tensor | None, rows: torch.Tensor, scale_rows: torch.Tensor | None
) -> torch.Tensor:
    """Return rows of one token and head each in float32, [*rows, dim]."""
    flat = (codes.view(torch.uint8) if codes.dtype in KV_CODES else codes).view(-1, codes.shape[3])
    taken = flat.index_select(0, rows.view(-1)).view(codes.dtype).float().view(*rows.shape, -1)
    if scales is not None:
        assert scale_rows is not None
        taken *= scales.view(-1)[scale_rows].unsqueeze(-1)
    return taken
