"""Verifies the guesses of a pass: which of the tokens drawn behind them are the sequences' next ones.

See [Note: guesses] in `zinfer.scheduling.speculation`.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, count

from zinfer.batching.running_request import RunningRequest
from zinfer.requests.logprobs import Logprobs
from zinfer.sampling.sampler import BROKEN, Row, Sampled
from zinfer.scheduling.sequence import Sequence as TokenSequence

Guesses = Sequence[tuple[int, ...]]


@dataclass(frozen=True, eq=False)
class Round:
    """The next token of each of several requests."""

    sequences: Sequence[TokenSequence]
    rows: Sequence[RunningRequest]
    token_ids: Sequence[int]
    logprobs: Sequence[Logprobs | None]


def rows_behind(row: Row, guesses: Sequence[int]) -> list[Row]:
    """Return the rows to draw from: behind the output so far, and behind each guess as if all before it were right."""
    if row.is_plain:
        return [row] * (1 + len(guesses))
    after = (replace(row, output_ids=[*row.output_ids, *guesses[:end]]) for end in range(1, len(guesses) + 1))
    return [row, *after]


def rounds(
    sequences: Sequence[TokenSequence],
    rows: Sequence[RunningRequest],
    guesses: Guesses,
    sampled: Sampled,
    running: Collection[int],
) -> Iterator[Round]:
    """Yield the tokens of a pass round by round: first each request's next one, then those behind right guesses.

    Args:
        guesses: of each request; empty if the pass had none.
        running: numbers of the sequences that have not ended; looked at before each further round.
    """
    if not guesses:
        yield Round(sequences, rows, sampled.token_ids, sampled.logprobs)
        return
    sizes = (1 + len(each) for each in guesses)
    begins, token_ids = list(accumulate(sizes, initial=0)), sampled.token_ids
    going_on = list(range(len(rows)))
    for number in count():
        places = [begins[each] + number for each in going_on]
        yield Round(
            [sequences[each] for each in going_on],
            [rows[each] for each in going_on],
            [token_ids[at] for at in places],
            [sampled.logprobs[at] for at in places],
        )
        going_on = [
            each
            for each, at in zip(going_on, places, strict=True)
            if number < len(guesses[each])
            and token_ids[at] == guesses[each][number]
            and token_ids[at + 1] != BROKEN  # computed again as the next token, which finds where it broke
            and sequences[each].number in running
        ]
        if not going_on:
            return
