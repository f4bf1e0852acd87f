"""The sequences that hold pages, in the order in which they were admitted."""

from collections.abc import Iterator

from zinfer.scheduling.sequence import Sequence


class Running:
    """All that run; between two passes every one but the last has the last token of its output left to compute, and
    nothing else."""

    def __init__(self) -> None:
        self._sequences: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())

    @property
    def last(self) -> Sequence | None:
        """The one that was admitted last."""
        return next(reversed(self._sequences.values()), None)

    @property
    def prompt(self) -> Sequence | None:
        """The last one, where more of it is left than a token of its output."""
        last = self.last
        return last if last and (last.num_tokens - last.num_computed > 1 or not last.output_ids) else None

    def decodes(self) -> list[Sequence]:
        """All but the prompt under way."""
        sequences = list(self._sequences.values())
        return sequences if self.prompt is None else sequences[:-1]

    def add(self, sequence: Sequence) -> None:
        """One more behind the others."""
        self._sequences[sequence.number] = sequence

    def remove(self, sequence: Sequence) -> None:
        """Take one out, if it is here."""
        self._sequences.pop(sequence.number, None)
