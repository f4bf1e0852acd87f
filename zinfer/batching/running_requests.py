"""`RunningRequests`: the requests under way, which take the tokens of each pass until they are complete."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

from zinfer.batching.handle import Event, Token
from zinfer.batching.known_tokens import EVERYTHING, count_needed
from zinfer.batching.prompt_scorer import ScoredSpan
from zinfer.batching.request import Request
from zinfer.batching.running_request import RunningRequest
from zinfer.batching.stage_tokens import Coming, Looked
from zinfer.batching.verification import Guesses, Round, rounds
from zinfer.engine.finite_check import FiniteWatch
from zinfer.kv_cache.base import PageCache
from zinfer.requests.completion import not_finite
from zinfer.sampling.sampler import BROKEN, Row, Sampled, row_uniform
from zinfer.sampling.structure import StructureMatcher
from zinfer.scheduling.schedule import Chunks
from zinfer.scheduling.scheduler import Scheduler
from zinfer.scheduling.sequence import Sequence as TokenSequence
from zinfer.scheduling.sequence import SequenceState
from zinfer.scheduling.speculation import Speculation


@dataclass(frozen=True, eq=False)
class Drawing:
    """The tokens of a pass.

    Attributes:
        sequences, rows: that get a token.
        result: the tokens, on the device, the host or the last stage.
        scored: spans of prompts whose scores come with them.
        guesses: that they verify.
        known: tokens that are known, by their places in the result, whose own are dropped.
        is_computed: whether the pass was; it is not if it has known tokens alone.
        is_settled: as of `PassRunner`, of the pass.
    """

    sequences: Sequence[TokenSequence]
    rows: Sequence[RunningRequest]
    result: Coming
    looks: Looked
    scored: Sequence[ScoredSpan] = ()
    guesses: Guesses = ()
    known: Mapping[int, int] = field(default_factory=dict)
    is_computed: bool = True
    is_settled: bool = True

    def take(self) -> Sampled:
        """Wait for the tokens."""
        sampled = self.result.take()
        for place, token_id in self.known.items():
            sampled.token_ids[place] = token_id
        return sampled


class RunningRequests:
    """The requests that are not complete.

    A request whose logits are not finite is computed once more if it shares pages, which another may have damaged; the
    watch then tells in which module numbers break.

    Attributes:
        by_number: the requests, by the numbers of their sequences.
        num_new_tokens: that were drawn and taken.

    Args:
        scheduler: of their sequences.
        cache: holds their pages.
        watch: looks for numbers that are not finite while a request is computed once more.
        speculation: guesses tokens; None: nothing does.
    """

    def __init__(
        self, scheduler: Scheduler, cache: PageCache, watch: FiniteWatch, speculation: Speculation | None
    ) -> None:
        self._scheduler = scheduler
        self._cache = cache
        self._watch = watch
        self._speculation = speculation
        self.by_number: dict[int, RunningRequest] = {}
        self._read: set[int] = set()  # those with a grammar or stop strings, which any token may complete
        # Of the requests since `begin`: token ids that may complete one, and whether any wants its tokens one by one.
        self._last_ids: set[int] = set()
        self._tells = False
        self._suspects: dict[int, str] = {}  # restarted sequences, and where they broke
        self._num_needed: dict[Request, int] = {}  # of those whose tokens are known
        self._num_added = 0
        self.num_new_tokens = 0

    @property
    def has_known(self) -> bool:
        """Whether the tokens of some requests since `begin` are known; see [Note: known tokens] in `known_tokens`."""
        return bool(self._num_needed)

    def begin(self, requests: Sequence[Request]) -> None:
        """Forget what earlier requests could end by; none may be unfinished.

        Args:
            requests: the first ones to come.
        """
        assert not self.by_number
        self._num_needed = count_needed(requests, self._cache.page_size)
        self._last_ids, self._tells = {BROKEN}, False

    def drop(self, scheduler: Scheduler) -> None:
        """Drop all requests; later ones are of this scheduler."""
        self._watch.stop()
        for each in (self.by_number, self._read, self._suspects):
            each.clear()
        self._scheduler = scheduler

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            PlanError: the cache could not hold it even alone.
        """
        params, ends, seed = request.params, request.end_token_ids, request.seed
        sequence = TokenSequence(
            self._num_added,
            request.prompt_ids,
            max(params.most_new_tokens, 1),  # one that is dropped, if only the prompt is scored
            num_to_score=0 if params.prompt_logprobs is None else len(request.prompt_ids) - 1,
            num_scored=params.prompt_logprobs_start - 1,  # a token's logits score the next one
            precedence=request.precedence,
        )
        self._scheduler.add(sequence)
        self._num_added += 1
        uniform_at, output_ids = partial(row_uniform, seed), sequence.output_ids
        matcher = None
        if request.grammar is not None:
            matcher = StructureMatcher(request.grammar, ends, request.stop_criteria.last_ids)
        row = Row(
            params, sequence.prompt_ids, output_ids, ends, uniform_at, request.bad_word_ids, matcher, request.rules
        )
        num_needed = self._num_needed.get(request, EVERYTHING)
        self.by_number[sequence.number] = RunningRequest(request, sequence, row, num_needed)
        self._last_ids |= request.stop_criteria.last_ids
        if request.stop_criteria.reads or matcher is not None:
            self._read.add(sequence.number)
        self._tells |= request.detokenizer is not None

    def needs(self, chunks: Chunks) -> bool:
        """Whether a pass must be computed for any of its chunks."""
        if not self._num_needed:
            return True
        pairs, writing = zip(chunks.sequences, chunks.begins, strict=True), self.by_number
        return any(begin < writing[sequence.number].num_needed for sequence, begin in pairs)

    def known(self, rows: Sequence[RunningRequest], guesses: Guesses) -> dict[int, int]:
        """Return the next tokens that are known, by their places among those of a pass.

        Args:
            guesses: of each request; empty if the pass has none.
        """
        found: dict[int, int] = {}
        if self._num_needed:
            begin = 0
            for number, each in enumerate(rows):
                end = begin + 1 + (len(guesses[number]) if guesses else 0)
                found.update(zip(range(begin, end), each.next_known(end - begin), strict=False))
                begin = end
        return found

    def cancel(self, requests: Collection[Request]) -> list[Event]:
        """End those of the requests that are unfinished, between two passes; returns their completions so far."""
        unwanted = set(requests)
        return [self._finish(each, "cancelled") for each in [*self.by_number.values()] if each.request in unwanted]

    def receive(self, drawn: Drawing, sampled: Sampled) -> list[Event]:
        """Take the tokens of a pass; returns the requests they complete, and the tokens of others."""
        if self._watch.is_on and (where := drawn.looks.where()) is not None:
            self._suspects |= {number: self._suspects[number] or where for number in self._suspects}
        scores = iter(sampled.scores)
        for span in drawn.scored:
            span.request.add_scores(span.begin, islice(scores, span.end - span.begin))
        events: list[Event] = []
        for number, each in enumerate(rounds(drawn.sequences, drawn.rows, drawn.guesses, sampled, self.by_number)):
            events += self._take(each, is_guessed=number > 0)
        if self._speculation is not None:
            self._speculation.num_guessed += sum(map(len, drawn.guesses))
        return events

    def _take(self, found: Round, *, is_guessed: bool) -> list[Event]:
        """Take a token of each of several requests; returns those they complete, and the tokens of others."""
        writing = self.by_number  # without those that were cancelled meanwhile
        if is_guessed:
            for sequence, token_id in zip(found.sequences, found.token_ids, strict=True):
                self._scheduler.accept(sequence, token_id)
            if self._speculation is not None:
                self._speculation.num_accepted += len(found.rows)
            broken: set[int] = set()
        else:
            pairs = list(zip(found.sequences, found.token_ids, strict=True))
            broken = {each.number for each, token_id in pairs if token_id == BROKEN and each.number in writing}
            self._scheduler.receive(pair for pair in pairs if pair[1] != BROKEN)
        num_known = sum(each.request.known_ids is not None for each in found.rows) if self._num_needed else 0
        self.num_new_tokens += len(found.rows) - len(broken) - num_known
        for each, logprobs in zip(found.rows, found.logprobs, strict=True):
            if logprobs is not None:
                each.logprobs.append(logprobs)
        restarted = self._restart(broken)
        events: list[Event] = []
        for each in self._perhaps_complete(found):
            number = each.sequence.number
            if number in broken:
                if number not in restarted:
                    events.append(self._give_up(each))
            elif number in writing and (end := each.end()) is not None:
                self.num_new_tokens -= each.request.known_ids is None and not each.request.params.most_new_tokens
                events.append(self._finish(each, *end))
        return [*self._new_tokens(found, broken), *events] if self._tells else events

    def _new_tokens(self, found: Round, broken: set[int]) -> Iterator[Event]:
        """Yield the new tokens of unfinished requests that want them one by one."""
        for each in found.rows:
            number = each.sequence.number
            if each.request.detokenizer is not None and number in self.by_number and number not in broken:
                output_ids, logprobs = each.sequence.output_ids, each.logprobs[-1] if each.logprobs else None
                yield each.request, Token(output_ids[-1], logprobs, each.scores if len(output_ids) == 1 else None)

    def _perhaps_complete(self, found: Round) -> Sequence[RunningRequest]:
        """Return requests that may be complete. Keep the loop minimal: it runs per sequence per pass."""
        last_ids, ended = self._last_ids, SequenceState.FINISHED  # with all the tokens that they may have
        sequences = found.sequences
        each = enumerate(zip(sequences, found.token_ids, strict=True))
        places = [place for place, (sequence, token_id) in each if token_id in last_ids or sequence.state is ended]
        if self._read:
            read = {place for place, sequence in enumerate(sequences) if sequence.number in self._read}
            places = sorted(read.union(places))
        return [found.rows[place] for place in places]

    def _restart(self, broken: set[int]) -> set[int]:
        """Restart the broken sequences that share pages, because another sequence may have damaged those pages.

        A restarted sequence shares no pages.
        """
        restarted = {number for number in broken if self.by_number[number].sequence.shares}
        for number in sorted(restarted, reverse=True):
            self._scheduler.restart(self.by_number[number].sequence)
            self._cache.forget(number)
            self._suspects[number] = ""
            self._watch.start()
        if broken:  # their pages may hold NaN from earlier tokens too
            self._scheduler.forget()
        return restarted

    def _give_up(self, each: RunningRequest) -> Event:
        """End a request whose logits are not finite, with the tokens before them."""
        each.sequence.output_ids.pop()
        return self._finish(each, "error", not_finite(self._suspects.get(each.sequence.number)))

    def _finish(self, each: RunningRequest, reason: str, error: str | None = None) -> Event:
        request, sequence = each.request, each.sequence
        if sequence.state is not SequenceState.FINISHED:
            self._scheduler.end(sequence)
        self._cache.forget(sequence.number)  # also of one whose guesses were right after it was swapped out
        del self.by_number[sequence.number]
        self._read.discard(sequence.number)
        if self._suspects.pop(sequence.number, None) is not None and not self._suspects:
            self._watch.stop()
        return request, each.completion(reason, error)
