"""What one pass computes: chunks of sequences, and the pages that are swapped out and in before them."""

from collections import abc
from dataclasses import dataclass, field
from typing import NamedTuple, overload

from zinfer.scheduling.sequence import Sequence


class Chunk(NamedTuple):
    """Neighbouring tokens of one sequence.

    begin, end: positions in the sequence's tokens, ``end`` exclusive; what comes before lies in its pages, or is
        written to them by an earlier chunk of the same pass.
    samples: whether the chunk reaches the last token, so that the next one is wanted.
    """

    sequence: Sequence
    begin: int
    end: int
    samples: bool


class Chunks(abc.Sequence[Chunk]):
    """The chunks of a pass, in order, as columns: it has one for every running sequence, and an object for each, or a
    look at all that each of them needs, is most of what a pass costs the host.

    Args:
        chunks: any.

    Attributes:
        sequences, begins, ends, samples: the columns.
        num_decodes: how many of the first are known to be the last token of an output, one each, and to sample; none
            of those that were given one by one.
    """

    def __init__(self, chunks: abc.Iterable[Chunk] = ()) -> None:
        self.sequences: list[Sequence] = []
        self.begins: list[int] = []
        self.ends: list[int] = []
        self.samples: list[bool] = []
        self.num_decodes = 0
        for chunk in chunks:
            self.append(chunk)

    @classmethod
    def of_decodes(cls, sequences: abc.Sequence[Sequence]) -> "Chunks":
        """One of each: its last token, which is of its output and the only one that is not computed."""
        chunks = cls()
        chunks.sequences = list(sequences)
        chunks.begins = [sequence.num_computed for sequence in sequences]
        chunks.ends = [begin + 1 for begin in chunks.begins]
        chunks.num_decodes = len(sequences)
        chunks.samples = [True] * chunks.num_decodes
        return chunks

    def append(self, chunk: Chunk) -> None:
        """One more behind the others."""
        self.sequences.append(chunk.sequence)
        self.begins.append(chunk.begin)
        self.ends.append(chunk.end)
        self.samples.append(chunk.samples)

    def __len__(self) -> int:
        return len(self.sequences)

    @overload
    def __getitem__(self, place: int) -> Chunk: ...
    @overload
    def __getitem__(self, place: slice) -> list[Chunk]: ...
    def __getitem__(self, place: int | slice) -> Chunk | list[Chunk]:
        if isinstance(place, slice):
            columns = self.sequences, self.begins, self.ends, self.samples
            return list(map(Chunk, *(column[place] for column in columns)))
        return Chunk(self.sequences[place], self.begins[place], self.ends[place], self.samples[place])

    def __iter__(self) -> abc.Iterator[Chunk]:
        return map(Chunk, self.sequences, self.begins, self.ends, self.samples)


class PassSize(NamedTuple):
    """What one pass carries.

    num_tokens: tokens that are computed.
    num_samples: sequences that get a next token.
    num_context: tokens that are attended to, over all sequences.
    num_lent_pages: pages that were to spare, and lent to weights, in the pass before.
    num_pairs: of a prompt's token and one that it attends to.
    """

    num_tokens: int
    num_samples: int
    num_context: int
    num_lent_pages: int = 0
    num_pairs: int = 0


@dataclass
class Pass:
    """One walk over the model.

    First the pages of the preempted sequences are copied off the device, then those of the returning ones back, then
    all chunks are computed: their pages may be the very ones that were swapped out. Keys and values of a chunk are to
    be written before the chunks after it attend, because these may share its pages.

    Attributes:
        num_lent_pages: as in `PassSize`.
        chunks: at most one of a sequence, in order.
        swapped_out: sequences with the pages to copy out, in token order.
        swapped_in: sequences with the pages to copy into: the last so many of those that were swapped out. What came
            before them was found on the device; where all of it was, there are none.
    """

    num_lent_pages: int = 0
    chunks: Chunks = field(default_factory=Chunks)
    swapped_out: list[tuple[Sequence, tuple[int, ...]]] = field(default_factory=list)
    swapped_in: list[tuple[Sequence, tuple[int, ...]]] = field(default_factory=list)

    @property
    def size(self) -> PassSize:
        chunks = self.chunks
        num_context = sum(chunks.ends)
        # Chunk by chunk the sum of begin + 1 to end.
        behind = slice(chunks.num_decodes, None)
        pairs = [
            (end - begin) * (begin + end + 1) // 2
            for begin, end in zip(chunks.begins[behind], chunks.ends[behind], strict=True)
            if end - begin > 1
        ]
        num_tokens = num_context - sum(chunks.begins)
        return PassSize(num_tokens, sum(chunks.samples), num_context, self.num_lent_pages, sum(pairs))
