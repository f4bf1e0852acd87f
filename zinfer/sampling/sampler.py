"""Chooses the next token of every row of a batch, on the device that holds the logits.

A row's token and log-probabilities depend only on the row: they are bit-identical in every batch. There is no random
state; each draw's uniform number is a function of the row's seed and step (`row_uniform`). The caller checks for end
tokens and stop strings.
"""

import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import torch

from zinfer.requests.bad_words import last_ids
from zinfer.requests.generation_config import NO_RULES, TokenRules
from zinfer.requests.logprobs import Logprobs
from zinfer.requests.sampling_params import SamplingParams
from zinfer.sampling import MOST_PART_LOGITS
from zinfer.sampling.async_copy import DeviceToHostCopy, send
from zinfer.sampling.filters import draw, kind_of
from zinfer.sampling.penalties import Penalty, add_biases, forbid, keep_masked, keep_only, penalize
from zinfer.sampling.structure import StructureMatcher, token_masks
from zinfer.sampling.weighed import Weighed

_STREAM: Final = b"zinfer draw"

BROKEN: Final = -1
"""The token of a broken row, whose logits are not finite."""


@dataclass(frozen=True)
class Row:
    """The inputs of a row's next token, besides its logits.

    prompt_ids, output_ids: its tokens so far; `output_ids` grows while the row is in use. end_token_ids: the model's.
    uniform_at: returns the number in [0, 1) for the draw after so many tokens; not called for greedy rows.
    bad_word_ids: tokens of each of its bad words.
    matcher: follows its output through a grammar, up to its last token; None if it has none.
    rules: of the model, for its tokens.
    """

    params: SamplingParams
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    end_token_ids: Collection[int]
    uniform_at: Callable[[int], float]
    bad_word_ids: Sequence[tuple[int, ...]] = ()
    matcher: StructureMatcher | None = None
    rules: TokenRules = NO_RULES

    @cached_property
    def is_plain(self) -> bool:
        """Whether decoding is greedy on unchanged logits, without logprobs, at every step."""
        return self.params.is_plain and not self.rules

    @property
    def forced_id(self) -> int | None:
        """The only token that it may get next; None: no rule says. Grammars come before rules."""
        if not self.rules or self.matcher is not None:
            return None
        return self.rules.forced(len(self.output_ids), self.params.most_new_tokens)


@dataclass(frozen=True)
class Sampled:
    """The result of one batch, row by row.

    token_ids: `BROKEN` for a broken row. logprobs: None if the row did not ask for them, or is broken.
    broken: rows whose logits hold NaN or +inf, or nothing finite before or after biases and penalties.
    scores: of the tokens that were given rather than drawn, in order; None where logits are not finite.
    """

    token_ids: list[int]
    logprobs: list[Logprobs | None]
    broken: tuple[int, ...]
    scores: Sequence[Logprobs | None] = ()


def row_uniform(seed: int, step: int) -> float:
    """Return the uniform number in [0, 1) of a row's draw `step`: a multiple of 2**-53, the same on every machine.

    seed, step: from 0 to 2**64 - 1.
    """
    counter = seed.to_bytes(8, "little") + step.to_bytes(8, "little")
    digest = hashlib.blake2b(counter, digest_size=8, person=_STREAM).digest()
    return float((int.from_bytes(digest, "little") >> 11) * 2.0**-53)


class Drawn:
    """The tokens drawn for one batch, on the device, while they are copied to the host.

    Args:
        token_ids: [rows] int64 on the device, `BROKEN` for a broken row.
        weighed: of rows that ask for logprobs, with their indices.
        scores: of tokens that were not drawn.
    """

    def __init__(
        self,
        token_ids: torch.Tensor,
        weighed: Sequence[tuple[Sequence[int], Weighed]] = (),
        scores: Sequence[Weighed] = (),
    ) -> None:
        self.token_ids = token_ids
        self._weighed, self._scores = weighed, scores
        several = [*(each for _, each in weighed), *scores]
        self._copy = DeviceToHostCopy([token_ids, *(tensor for each in several for tensor in each.tensors)])

    def take(self) -> Sampled:
        """Wait for the copy and return the result."""
        token_ids, *rest = self._copy.take()
        ids: list[int] = token_ids.tolist()
        on_host = iter(rest)
        logprobs: list[Logprobs | None] = [None] * len(ids)
        for rows, each in self._weighed:
            for row, found in zip(rows, each.logprobs(on_host), strict=True):
                logprobs[row] = found if ids[row] != BROKEN else None
        scores = [found for each in self._scores for found in each.logprobs(on_host)]
        return Sampled(ids, logprobs, tuple(row for row, token_id in enumerate(ids) if token_id == BROKEN), scores)


class Sampler:
    """Samples batches of logits of `vocab_size` tokens on `device`; keeps nothing between calls.

    It needs memory for `part_logits` logits at a time, which changes no result.
    """

    def __init__(self, vocab_size: int, device: torch.device | str, part_logits: int = MOST_PART_LOGITS) -> None:
        assert vocab_size >= 1
        self.vocab_size = vocab_size
        self._num_at_once = max(1, part_logits // vocab_size)
        self.device = torch.device(device)

    def draw(self, logits: torch.Tensor, rows: Sequence[Row], scores: Sequence[Weighed] = ()) -> Drawn:
        """Draw each row's token without waiting for the device.

        logits: [rows, vocab_size or more], float32 or shorter, not changed; columns beyond `vocab_size` are padding.
        scores: of `score`, to be copied to the host too.
        """
        logits_RV = self._checked(logits)
        assert logits.shape[0] == len(rows)
        if all(map(_is_plain, [row for row in rows if not row.is_plain])):
            peak_R, best_R = logits_RV.max(dim=1)
            return Drawn(torch.where(peak_R.isfinite(), best_R, BROKEN), scores=scores)
        chosen: list[torch.Tensor] = []
        weighed: list[tuple[Sequence[int], Weighed]] = []
        for start in range(0, len(rows), self._num_at_once):
            part = slice(start, start + self._num_at_once)
            chosen.append(_choose(logits_RV[part], rows[part]))
            if asking := [i for i, row in enumerate(rows[part]) if row.params.logprobs is not None]:
                places = send(asking, torch.int64, logits.device)
                nums_top = [rows[start + i].params.logprobs or 0 for i in asking]
                own = Weighed.of(logits_RV[part][places], chosen[-1][places], nums_top)
                weighed.append(([start + i for i in asking], own))
        nothing = torch.empty(0, dtype=torch.int64, device=logits.device)
        return Drawn(torch.cat([nothing, *chosen]), weighed, scores)

    def score(self, logits: torch.Tensor, token_ids: Sequence[int], nums_top: Sequence[int]) -> list[Weighed]:
        """Weigh given tokens, and the ``nums_top`` most likely ones, by logits as for `draw`; for `draw` to copy."""
        logits_RV, given_R = self._checked(logits), send(token_ids, torch.int64, logits.device)
        starts = range(0, len(token_ids), self._num_at_once)
        parts = [slice(start, start + self._num_at_once) for start in starts]
        return [Weighed.of(logits_RV[part], given_R[part], nums_top[part]) for part in parts]

    def sample(self, logits: torch.Tensor, rows: Sequence[Row]) -> Sampled:
        """As `draw`, but waits until the tokens are on the host."""
        return self.draw(logits, rows).take()

    def _checked(self, logits: torch.Tensor) -> torch.Tensor:
        assert logits.device.type == self.device.type
        assert logits.dtype in (torch.float32, torch.bfloat16, torch.float16)
        assert logits.ndim == 2
        assert logits.shape[1] >= self.vocab_size
        return logits[:, : self.vocab_size]


def _choose(raw_RV: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """Return each row's token, `BROKEN` for a broken row."""
    peak_R, best_R = raw_RV.max(dim=1)
    usable_R = peak_R.isfinite()
    logits_RV = raw_RV
    if any(map(_is_adjusted, rows)):
        logits_RV = _adjusted(raw_RV, rows)
        peak_R, best_R = logits_RV.max(dim=1)
        usable_R &= peak_R.isfinite()
    groups: dict[tuple[bool, bool], list[int]] = {}
    for i, row in enumerate(rows):
        if not row.params.is_greedy:
            groups.setdefault(kind_of(row.params, raw_RV.shape[1]), []).append(i)
    for members in groups.values():
        params = [rows[i].params for i in members]
        places = send(members, torch.int64, raw_RV.device)
        # Broken rows are drawn as if all tokens were equally likely; their result is not used.
        whole_M = usable_R[places]
        logits_MV = torch.where(whole_M[:, None], logits_RV[places], 0)
        peak_M = torch.where(whole_M, peak_R[places], 0)
        uniforms = [rows[i].uniform_at(len(rows[i].output_ids)) for i in members]
        best_R[places] = draw(logits_MV, peak_M, params, uniforms)
    return torch.where(usable_R, best_R, BROKEN)


def _adjusted(raw_RV: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """Return a float32 copy with biases, forbidden tokens, grammars and penalties applied."""
    logits_RV = raw_RV.to(torch.float32, copy=True)
    add_biases(logits_RV, {i: row.params.logit_bias for i, row in enumerate(rows) if row.params.logit_bias})
    forced: dict[int, Collection[int]] = {
        i: (token_id,) for i, row in enumerate(rows) if (token_id := row.forced_id) is not None
    }
    allowed = ((i, row.params.allowed_token_ids) for i, row in enumerate(rows))
    keep_only(logits_RV, {**{i: token_ids for i, token_ids in allowed if token_ids is not None}, **forced})
    limited = {i: row for i, row in enumerate(rows) if row.bad_word_ids or row.rules or _is_too_short(row)}
    forbid(logits_RV, {i: _forbidden(row) for i, row in limited.items() if i not in forced})
    if matched := {i: row.matcher for i, row in enumerate(rows) if row.matcher is not None}:
        keep_masked(logits_RV, list(matched), token_masks(list(matched.values()), is_pinned=logits_RV.is_cuda))
    penalized = [(i, row) for i, row in enumerate(rows) if row.params.has_penalty]
    penalize(logits_RV, [Penalty(i, row.params, row.prompt_ids, row.output_ids) for i, row in penalized])
    return logits_RV


def _forbidden(row: Row) -> set[int]:
    """Return the tokens that would complete a bad word, and end tokens while the row is below its minimum length."""
    ends = (*row.end_token_ids, *row.params.stop_token_ids) if _is_too_short(row) else ()
    ruled = row.rules.forbidden(row.prompt_ids, row.output_ids) if row.rules else ()
    return {*ends, *ruled, *last_ids(row.bad_word_ids, row.output_ids)}


def _is_plain(row: Row) -> bool:
    return row.params.is_greedy and row.params.logprobs is None and not _is_adjusted(row)


def _is_adjusted(row: Row) -> bool:
    return row.params.changes_logits or bool(row.rules) or _is_too_short(row)


def _is_too_short(row: Row) -> bool:
    return len(row.output_ids) < row.params.min_new_tokens
