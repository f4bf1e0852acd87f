"""The tokens of a pass as tensors: one ragged batch of concatenated sequences, without padding."""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

import numpy as np
import torch

from zinfer.batching.pass_bucket import PassBucket
from zinfer.kernels.kv_pages import PagedLayout
from zinfer.nvme.aligned import align_up
from zinfer.sampling.async_copy import send_pinned
from zinfer.scheduling.schedule import Chunks
from zinfer.scheduling.sequence import PENDING
from zinfer.scheduling.sequence import Sequence as TokenSequence

_ALIGNMENT: Final = 32  # in numbers: Triton recompiles a kernel if a pointer's alignment changes
Ints = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


@dataclass(frozen=True, eq=False)
class Part:
    """Neighbouring tokens of a pass, and their places in the pages.

    tokens: their slice of the pass's tokens.
    places: [tokens of the part] int64, where their keys and values are written.
    """

    tokens: slice
    places: torch.Tensor
    layout: PagedLayout


@dataclass(frozen=True, eq=False)
class RaggedBatch:
    """The tokens of a pass.

    input_ids, position_ids: [1, tokens] int64.
    wanted: [logits] int64, indices of the tokens that get logits, in order: the last `Chunks.num_logits` of each chunk;
        with a bucket more of them, up to its segments, which nobody reads.
    parts: the tokens split into parts that are computed in order; later ones may attend to earlier ones.
    bucket: the size that the batch was padded to, if any.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    wanted: torch.Tensor
    parts: tuple[Part, ...]
    bucket: PassBucket | None = None

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[1]


@dataclass(frozen=True, eq=False)
class Pending:
    """The tokens of the pass before, which may not be known on the host yet.

    token_ids: [samples] int64 on the device, -1 for broken rows.
    places: index of each sequence's token among them, by the sequence's number.
    """

    token_ids: torch.Tensor
    places: Mapping[int, int]


class BatchBuilder:
    """Makes batches; page tables are kept from pass to pass, to save work.

    All numbers are sent to the device at once, because Python takes as long to send few as to send many.

    Args:
        page_size: tokens of a page.
        device: of the tensors.
        most_part_tokens: most tokens of a part; None: one part.
        stride: the distance of a layer's pages; see [Note: page by page] in `kv_cache.device`.
    """

    def __init__(
        self, page_size: int, device: torch.device, most_part_tokens: int | None = None, stride: int = 1
    ) -> None:
        self._page_size = page_size
        self._stride = stride
        self._device = device
        self._most_part_tokens = most_part_tokens
        self._tables = _PageTables()

    def build(self, chunks: Chunks, pending: Pending | None = None, bucket: PassBucket | None = None) -> RaggedBatch:
        """Make the batch of these chunks, in order.

        Args:
            pending: holds the sequences' last tokens that are `PENDING`.
            bucket: of these chunks, to pad the batch to; None: no padding.
        """
        chunks = bucket.fill(chunks) if bucket else chunks
        begins = np.array(chunks.begins, dtype=np.int64)
        sizes = np.array(chunks.ends, dtype=np.int64) - begins
        ends = sizes.cumsum()
        fewest_pages = bucket.num_pages if bucket else 0
        table = self._tables.of(chunks.sequences, fewest_pages)
        if self._stride > 1:
            table = table * self._stride
        positions = np.arange(ends[-1]) + np.repeat(begins - (ends - sizes), sizes)
        places = self._places(table, sizes, positions)
        wanted = _wanted(chunks, ends)
        if bucket is None:
            cuts = list(self._cuts(begins, sizes, ends))
        else:
            cuts = [_Cut.filling(bucket, begins + sizes, ends)]
            table, wanted = _grown(table, bucket.num_segments), _grown(wanted, bucket.num_segments)
        shapes = [table[cut.rows, : max(self._num_pages(cut.contexts), fewest_pages)] for cut in cuts]
        layouts = [part for cut, pages in zip(cuts, shapes, strict=True) for part in (cut.starts, cut.contexts, pages)]
        token_ids, sources = _token_ids(chunks, {} if pending is None else pending.places)
        unknown = np.flatnonzero(token_ids == PENDING)
        packed = _Packed([token_ids, positions, wanted, places, unknown, sources, *layouts], self._device)
        ids, at, wanted_at, where, targets, origins, *rest = packed.tensors
        ids = ids.long()
        if pending is not None and len(unknown):
            # A sequence with broken logits has no token (-1); its results are dropped later.
            ids[targets.long()] = pending.token_ids[origins.long()].clamp(min=0)
        parts = []
        for cut, (starts, contexts, pages) in zip(cuts, zip(*[iter(rest)] * 3, strict=True), strict=True):
            most_context = max(cut.most_context, fewest_pages * self._page_size)
            shape = bucket or cut
            layout = PagedLayout(starts, contexts, pages, shape.most_queries, most_context, shape.num_decodes)
            parts.append(Part(cut.tokens, where[cut.tokens].long(), layout))
        return RaggedBatch(ids[None], at.long()[None], wanted_at.long(), tuple(parts), bucket)

    def _places(self, table: Ints, sizes: Ints, positions: Ints) -> Ints:
        """Return each token's place among all pages; one division and a flat table are faster."""
        pages = positions // self._page_size
        begins = np.repeat(np.arange(len(sizes)) * table.shape[1], sizes)
        return positions + (table.reshape(-1).take(begins + pages) - pages) * self._page_size

    def _num_pages(self, contexts: Ints) -> int:
        return int(-(-contexts.max() // self._page_size))

    def _cuts(self, begins: Ints, sizes: Ints, ends: Ints) -> Iterator["_Cut"]:
        num_tokens = int(ends[-1])
        most = self._most_part_tokens or num_tokens
        for first in range(0, num_tokens, most):
            last = min(first + most, num_tokens)
            rows = slice(int(np.searchsorted(ends, first, side="right")), int(np.searchsorted(ends, last)) + 1)
            heads = ends[rows] - sizes[rows]
            stops = np.minimum(ends[rows], last)
            starts = np.concatenate([np.maximum(heads, first), stops[-1:]]) - first
            yield _Cut(slice(first, last), rows, starts, begins[rows] + stops - heads)


@dataclass(frozen=True, eq=False)
class _Cut:
    """A part's slice of tokens, its chunks (rows), where each starts in it, and their context lengths at its end."""

    tokens: slice
    rows: slice
    starts: Ints
    contexts: Ints

    @classmethod
    def filling(cls, bucket: PassBucket, contexts: Ints, ends: Ints) -> "_Cut":
        """Return the only part of padded chunks that end at ``ends``."""
        starts = _grown(np.concatenate([[0], ends]), bucket.num_segments + 1)
        return cls(slice(0, int(ends[-1])), slice(None), starts, _grown(contexts, bucket.num_segments))

    @property
    def most_queries(self) -> int:
        return int(np.diff(self.starts).max())

    @property
    def most_context(self) -> int:
        return int(self.contexts.max())

    @property
    def num_decodes(self) -> int | None:
        """The number of one-token segments, if all of them are at the front."""
        single = np.diff(self.starts) == 1
        count = int(single.sum())
        return count if bool(single[:count].all()) else None


class _PageTables:
    """The pages of sequences as rows of one table; a row is updated when its sequence's pages change."""

    def __init__(self) -> None:
        self._table = np.zeros((0, 1), dtype=np.int64)
        self._rows: dict[int, int] = {}
        # For each row the list object of its sequence's pages, which is replaced when a sequence frees its pages, and
        # the number of pages copied.
        self._pages: list[list[int] | None] = []
        self._lengths: list[int] = []

    def of(self, sequences: Sequence[TokenSequence], fewest_pages: int = 0) -> Ints:
        """Return the table [sequences, most pages]; entries beyond a sequence's pages are undefined."""
        pages = [sequence.pages for sequence in sequences]
        lengths = list(map(len, pages))
        most = max(fewest_pages, max(lengths))
        numbers = [sequence.number for sequence in sequences]
        rows = [self._rows.get(number, -1) for number in numbers]
        if most > self._table.shape[1] or len(self._rows) + rows.count(-1) > len(self._table):
            self._rebuild(len(sequences), most)
            rows = [-1] * len(rows)
        held, copied = self._pages, self._lengths
        for place, (row, own, length) in enumerate(zip(rows, pages, lengths, strict=True)):
            if row < 0 or held[row] is not own or copied[row] != length:
                rows[place] = self._update_row(numbers[place], own)
        return self._table[np.array(rows), :most]

    def _update_row(self, number: int, pages: list[int]) -> int:
        row = self._rows.get(number, len(self._rows))
        begin = self._lengths[row] if number in self._rows and self._pages[row] is pages else 0
        self._table[row, begin : len(pages)] = pages[begin:]
        self._pages[row], self._lengths[row], self._rows[number] = pages, len(pages), row
        return row

    def _rebuild(self, num_rows: int, num_pages: int) -> None:
        """Start a new table with twice the rows; this drops rows of ended sequences."""
        self._rows.clear()
        height, width = 2 * num_rows, max(num_pages + num_pages // 2, self._table.shape[1])
        self._pages, self._lengths = [None] * height, [0] * height
        self._table = np.zeros((height, width), dtype=np.int64)


class _Packed:
    """Integers sent in one copy; ``tensors`` are int32 views on the device, with the arrays' shapes."""

    def __init__(self, arrays: Sequence[Ints], device: torch.device) -> None:
        sizes = [align_up(each.size, _ALIGNMENT) for each in arrays]
        host = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=device.type == "cuda")
        flat = host.numpy()
        begins = list(accumulate(sizes, initial=0))
        for each, begin in zip(arrays, begins, strict=False):
            flat[begin : begin + each.size] = each.reshape(-1)
        there = send_pinned(host, device)
        pieces = [there[begin : begin + each.size] for each, begin in zip(arrays, begins, strict=False)]
        self.tensors = [
            piece.view(each.shape) if each.ndim > 1 else piece for piece, each in zip(pieces, arrays, strict=True)
        ]


def _grown(values: Ints, count: int) -> Ints:
    """Return ``count`` rows: the last one again and again behind the others, or zeros."""
    last = values[-1:] if len(values) else np.zeros((1, *values.shape[1:]), values.dtype)
    return np.concatenate([values, np.repeat(last, count - len(values), axis=0)])


def _wanted(chunks: Chunks, ends: Ints) -> Ints:
    """Return the places of the tokens that get logits in a pass whose chunks end at ``ends``."""
    counts = np.array(chunks.num_logits, dtype=np.int64)
    places: Ints = np.arange(counts.sum()) + np.repeat(ends - counts.cumsum(), counts)
    return places


def _token_ids(chunks: Chunks, known: Mapping[int, int]) -> tuple[Ints, Ints]:
    """Return the chunks' tokens, and the ``known`` values of those that are `PENDING`, in order."""
    decoding = chunks.sequences[: chunks.num_decodes]
    found = array("i", [sequence.output_ids[-1] for sequence in decoding])
    pairs = zip(decoding, found, strict=True)
    sources = [known[sequence.number] for sequence, last in pairs if last == PENDING]
    for sequence, begin, end, *_ in chunks[chunks.num_decodes :]:
        found += sequence.tokens(begin, end)
        if found[-1] == PENDING:
            sources.append(known[sequence.number])
    return np.array(found, np.int64), np.array(sources, np.int64)
