"""What one pass computes: chunks of sequences, and the pages that are parked and resumed before them."""

from dataclasses import dataclass
from typing import NamedTuple

from zinfer.batching.sequence import Sequence


class Chunk(NamedTuple):
    """Neighbouring tokens of one sequence. A tuple, because a pass has one for every running sequence.

    begin, end: positions in the sequence's tokens, ``end`` exclusive; what comes before lies in its pages, or is
        written to them by an earlier chunk of the same pass.
    samples: whether the chunk reaches the last token, so that the next one is wanted.
    """

    sequence: Sequence
    begin: int
    end: int
    samples: bool


class PassSize(NamedTuple):
    """What one pass carries.

    num_tokens: tokens that are computed.
    num_samples: texts that get a next token.
    num_context: tokens that are attended to, over all texts.
    num_lent_pages: pages that were to spare, and lent to weights, in the pass before.
    num_pairs: of a prompt's token and one that it attends to.
    """

    num_tokens: int
    num_samples: int
    num_context: int
    num_lent_pages: int = 0
    num_pairs: int = 0


@dataclass(frozen=True)
class Pass:
    """One walk over the model.

    First the pages of the parked sequences are copied off the device, then those of the resumed ones back, then all
    chunks are computed: their pages may be the very ones that were parked. Keys and values of a chunk are to be written
    before the chunks after it attend, because these may share its pages.

    Attributes:
        chunks: at most one of a sequence, in order.
        parked: sequences with the pages to copy out, in token order.
        resumed: sequences with the pages to copy into: the last so many of those that were parked. What came before
            them was found on the device; where all of it was, there are none.
        num_lent_pages: as in `PassSize`.
    """

    chunks: list[Chunk]
    parked: list[tuple[Sequence, tuple[int, ...]]]
    resumed: list[tuple[Sequence, tuple[int, ...]]]
    num_lent_pages: int = 0

    @property
    def size(self) -> PassSize:
        _, begins, ends, samples = zip(*self.chunks, strict=True)
        num_context = sum(ends)
        # Chunk by chunk the sum of begin + 1 to end.
        pairs = [
            (end - begin) * (begin + end + 1) // 2 for begin, end in zip(begins, ends, strict=True) if end - begin > 1
        ]
        return PassSize(num_context - sum(begins), sum(samples), num_context, self.num_lent_pages, sum(pairs))
