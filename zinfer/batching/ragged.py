"""The tokens of a pass as tensors: one ragged batch of sequences side by side, without padding."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from zinfer.kernels.kv_pages import PagedLayout


class Segment(Protocol):
    """Neighbouring tokens of one sequence that a pass computes: positions ``begin`` to ``end``, exclusive."""

    @property
    def begin(self) -> int: ...

    @property
    def end(self) -> int: ...

    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def pages(self) -> Sequence[int]: ...

    @property
    def samples(self) -> bool: ...


@dataclass(frozen=True, eq=False)
class Part:
    """Neighbouring tokens of a pass, and how they lie in the pages.

    tokens: which of the pass's tokens they are.
    places: [tokens of the part] int64, where their keys and values go.
    """

    tokens: slice
    places: torch.Tensor
    layout: PagedLayout


@dataclass(frozen=True, eq=False)
class RaggedBatch:
    """A pass's tokens.

    input_ids, position_ids: [1, tokens] int64.
    wanted: [samples] int64, the tokens after which a next one is wanted, in the order of the segments.
    parts: the tokens cut into parts that are computed one after the other; later ones may attend to earlier ones.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    wanted: torch.Tensor
    parts: tuple[Part, ...]

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[1]

    @classmethod
    def of(
        cls, segments: Sequence[Segment], page_size: int, device: torch.device, most_part_tokens: int | None = None
    ) -> "RaggedBatch":
        """The batch of a pass.

        Args:
            segments: what is computed, at least one token of each.
            page_size: tokens of a page.
            device: where the tensors go.
            most_part_tokens: tokens of a part at most; None: one part.
        """
        ids = np.concatenate([np.asarray(segment.token_ids, dtype=np.int64) for segment in segments])
        positions = np.concatenate([np.arange(segment.begin, segment.end) for segment in segments])
        ends = np.cumsum([segment.end - segment.begin for segment in segments])
        wanted = np.array([end - 1 for end, segment in zip(ends, segments, strict=True) if segment.samples], np.int64)
        parts = [_part(pieces, page_size, device) for pieces in _cut(segments, ends, most_part_tokens or int(ends[-1]))]
        first, place = torch.from_numpy(np.stack([ids, positions])).to(device)
        return cls(first[None], place[None], torch.from_numpy(wanted).to(device), tuple(parts))


@dataclass(frozen=True)
class _Piece:
    """Tokens ``first`` to ``last`` of a pass, exclusive, which are the segment's positions from ``begin`` on."""

    segment: Segment
    first: int
    last: int
    begin: int

    @property
    def context(self) -> int:
        return self.begin + self.last - self.first


def _cut(segments: Sequence[Segment], ends: np.ndarray, most_tokens: int) -> Iterator[list[_Piece]]:
    """The pieces of each part; a segment that reaches beyond a part goes on in the next one."""
    pieces: list[_Piece] = []
    room = most_tokens
    for segment, end in zip(segments, ends.tolist(), strict=True):
        first = end - (segment.end - segment.begin)
        begin = segment.begin
        while first < end:
            count = min(room, end - first)
            pieces.append(_Piece(segment, first, first + count, begin))
            first, begin, room = first + count, begin + count, room - count
            if not room:
                yield pieces
                pieces, room = [], most_tokens
    if pieces:
        yield pieces


def _part(pieces: Sequence[_Piece], page_size: int, device: torch.device) -> Part:
    starts = np.cumsum([0, *(piece.last - piece.first for piece in pieces)], dtype=np.int32)
    contexts = np.array([piece.context for piece in pieces], dtype=np.int32)
    table = np.zeros((len(pieces), int(-(-contexts.max() // page_size))), dtype=np.int32)
    places = []
    for row, piece in enumerate(pieces):
        pages = np.asarray(piece.segment.pages[: -(-piece.context // page_size)], dtype=np.int32)
        table[row, : len(pages)] = pages
        at = np.arange(piece.begin, piece.context)
        places.append(pages[at // page_size].astype(np.int64) * page_size + at % page_size)
    layout = PagedLayout(
        torch.from_numpy(starts).to(device),
        torch.from_numpy(contexts).to(device),
        torch.from_numpy(table).to(device),
        int(np.diff(starts).max()),
        int(contexts.max()),
    )
    tokens = slice(pieces[0].first, pieces[-1].last)
    return Part(tokens, torch.from_numpy(np.concatenate(places)).to(device), layout)
