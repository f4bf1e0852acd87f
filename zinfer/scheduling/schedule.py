"""The schedule of one pass: the chunks of sequences to compute, and the pages to swap out and in before them."""

from collections import abc
from dataclasses import dataclass, field
from itertools import repeat
from typing import NamedTuple, overload

from zinfer.scheduling.sequence import Sequence


class Chunk(NamedTuple):
    """Neighbouring tokens of one sequence.

    begin, end: positions in the sequence's tokens, ``end`` exclusive; tokens before are in its pages, or are written
        there by an earlier chunk of the same pass.
    samples: whether the chunk contains the last token, so that the next one is sampled.
    num_extra_logits: how many tokens get logits besides the sampled one: those right before it, or the last ones of a
        chunk that is not sampled.
    """

    sequence: Sequence
    begin: int
    end: int
    samples: bool
    num_extra_logits: int = 0


class Chunks(abc.Sequence[Chunk]):
    """The chunks of a pass, in order, stored as columns.

    A pass has a chunk for every running sequence; an object for each would be most of a pass's cost on the host.

    Args:
        chunks: any.

    Attributes:
        sequences, begins, ends, samples: the columns.
        extra_logits: `Chunk.num_extra_logits` by place, without zeros.
        num_decodes: how many chunks at the front are known to be decodes: one last token of an output, sampled.
            Chunks that are appended do not count.
    """

    def __init__(self, chunks: abc.Iterable[Chunk] = ()) -> None:
        self.sequences: list[Sequence] = []
        self.begins: list[int] = []
        self.ends: list[int] = []
        self.samples: list[bool] = []
        self.extra_logits: dict[int, int] = {}
        self.num_decodes = 0
        for chunk in chunks:
            self.append(chunk)

    @classmethod
    def of_decodes(cls, sequences: abc.Sequence[Sequence]) -> "Chunks":
        """Make a chunk of each sequence's last token, an output token and the only one not computed."""
        chunks = cls()
        chunks.sequences = list(sequences)
        chunks.begins = [sequence.num_computed for sequence in sequences]
        chunks.ends = [begin + 1 for begin in chunks.begins]
        chunks.num_decodes = len(sequences)
        chunks.samples = [True] * chunks.num_decodes
        return chunks

    def followed_by(self, others: abc.Iterable[Chunk]) -> "Chunks":
        """Return these chunks with others behind them."""
        found = Chunks()
        found.sequences, found.begins, found.ends = self.sequences.copy(), self.begins.copy(), self.ends.copy()
        found.samples, found.extra_logits = self.samples.copy(), self.extra_logits.copy()
        found.num_decodes = self.num_decodes
        for chunk in others:
            found.append(chunk)
        return found

    def append(self, chunk: Chunk) -> None:
        """Append a chunk."""
        if chunk.num_extra_logits:
            self.extra_logits[len(self.sequences)] = chunk.num_extra_logits
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
            return [self[each] for each in range(*place.indices(len(self)))]
        columns = self.sequences[place], self.begins[place], self.ends[place], self.samples[place]
        return Chunk(*columns, self.extra_logits.get(place % len(self), 0))

    def __iter__(self) -> abc.Iterator[Chunk]:
        extra_logits = map(self.extra_logits.get, range(len(self)), repeat(0)) if self.extra_logits else repeat(0)
        return map(Chunk, self.sequences, self.begins, self.ends, self.samples, extra_logits)

    @property
    def num_logits(self) -> list[int]:
        """How many tokens of each chunk get logits: its last ones."""
        found = list(map(int, self.samples))
        for place, number in self.extra_logits.items():
            found[place] += number
        return found


class PassSize(NamedTuple):
    """The size of one pass.

    num_tokens: tokens that are computed.
    num_samples: sequences that get a next token.
    num_context: tokens that are attended to, over all sequences.
    num_lent_pages: spare pages that were lent to weights in the pass before.
    num_pairs: pairs of a prompt token and a token that it attends to.
    """

    num_tokens: int
    num_samples: int
    num_context: int
    num_lent_pages: int = 0
    num_pairs: int = 0


@dataclass
class Pass:
    """One walk over the model.

    First the preempted sequences are swapped out, then the returning ones are swapped in, then all chunks are computed:
    they may use the pages that were swapped out. Keys and values of a chunk must be written before later chunks attend,
    because these may share its pages.

    Attributes:
        num_lent_pages: as in `PassSize`.
        has_guesses: whether the extra logits are those behind `Sequence.guesses`; all chunks are sampled then.
        chunks: at most one per sequence, in order.
        swapped_out: sequences with the pages to copy out, in token order.
        swapped_in: sequences with the pages to copy into, for the last pages that were swapped out. The pages before
            were found on the device, perhaps all of them.
    """

    num_lent_pages: int = 0
    has_guesses: bool = False
    chunks: Chunks = field(default_factory=Chunks)
    swapped_out: list[tuple[Sequence, tuple[int, ...]]] = field(default_factory=list)
    swapped_in: list[tuple[Sequence, tuple[int, ...]]] = field(default_factory=list)

    @property
    def size(self) -> PassSize:
        chunks = self.chunks
        num_context = sum(chunks.ends)
        # For each chunk the sum of begin + 1 to end.
        behind = slice(chunks.num_decodes, None)
        pairs = [
            (end - begin) * (begin + end + 1) // 2
            for begin, end in zip(chunks.begins[behind], chunks.ends[behind], strict=True)
            if end - begin > 1
        ]
        num_tokens = num_context - sum(chunks.begins)
        return PassSize(num_tokens, sum(chunks.samples), num_context, self.num_lent_pages, sum(pairs))
