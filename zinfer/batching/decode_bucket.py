"""Pads passes of a few decoding sequences to a few sizes, so that captured graphs can be replayed for them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from zinfer.planning.pass_sizes import round_up
from zinfer.scheduling.schedule import Chunk, Chunks

_MOST_ROWS: Final = 64
"""Passes of more rows compute for longer than Python takes to launch them."""
_ROWS_STEP: Final = 8
_FEWEST_TOKENS: Final = 1024


@dataclass(frozen=True)
class DecodeBucket:
    """The size that a decode pass is padded to.

    num_rows: rows; padding rows repeat the last one, which computes and writes the same again.
    num_pages: of each row's page table.
    """

    num_rows: int
    num_pages: int

    def fill(self, chunks: Sequence[Chunk]) -> Chunks:
        """Return the chunks, padded by repeating the last one."""
        return Chunks([*chunks, *[chunks[-1]] * (self.num_rows - len(chunks))])


def find_form(chunks: Sequence[Chunk], page_size: int, most_part_tokens: int | None = None) -> DecodeBucket | None:
    """Return the bucket of a pass; None unless it has one sampled token each of a few sequences, in a single part."""
    if len(chunks) > _MOST_ROWS or any(chunk.end - chunk.begin > 1 or not chunk.samples for chunk in chunks):
        return None
    most_tokens = max(_FEWEST_TOKENS, *(chunk.end for chunk in chunks))
    num_rows = round_up(len(chunks), _ROWS_STEP)
    if most_part_tokens is not None and num_rows > most_part_tokens:
        return None
    return DecodeBucket(num_rows, -(-(1 << (most_tokens - 1).bit_length()) // page_size))
