"""Chooses the next token of every row of a batch, on the device that holds the logits.

A row's token and log-probabilities depend on the row alone: they are the same, bit for bit, whatever batch it is in.
No random state is kept; each draw's uniform number is a function of the row's seed and step (`row_uniform`). Nothing
here ends a row: end tokens and stop strings are the caller's to look for.
"""

import hashlib
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from zinfer.batching.filters import draw, fixed_point, kind_of, ratios_of, unit_of
from zinfer.batching.penalties import Penalty, add_biases, forbid, penalize
from zinfer.batching.sampling_params import SamplingParams

# Rows that are not plainly greedy take up to about a hundred bytes a logit while they are sampled (float64 and int64
# copies, a sort's buffers): they are done in parts of so many logits, at least one row, whatever the batch is.
_PART_LOGITS: Final = 2**23

_STREAM: Final = b"zinfer draw"


@dataclass(frozen=True)
class Row:
    """All that a row's next token depends on, besides its logits.

    prompt_ids, output_ids: its tokens so far. end_token_ids: the model's. uniform: in [0, 1), not read where the row
    is greedy.
    """

    params: SamplingParams
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    end_token_ids: Collection[int]
    uniform: float


@dataclass(frozen=True)
class Logprobs:
    """Natural logarithms of probabilities under the model's own logits, before biases, penalties, temperature, filters.

    chosen: of the chosen token. top_ids, top: of the most likely tokens, in order, the lower id first among equals.
    """

    chosen: float
    top_ids: list[int]
    top: list[float]


@dataclass(frozen=True)
class Sampled:
    """One batch's result, row by row.

    token_ids: -1 for a broken row. logprobs: None where the row did not ask, or is broken.
    broken: rows without a token: their logits hold NaN or +inf, or nothing finite before or after biases and penalties.
    """

    token_ids: list[int]
    logprobs: list[Logprobs | None]
    broken: tuple[int, ...]


def row_uniform(seed: int, step: int) -> float:
    """The uniform number in [0, 1) of a row's draw number `step`: a multiple of 2**-53, the same on every machine.

    seed, step: from 0 to 2**64 - 1.
    """
    counter = seed.to_bytes(8, "little") + step.to_bytes(8, "little")
    digest = hashlib.blake2b(counter, digest_size=8, person=_STREAM).digest()
    return float((int.from_bytes(digest, "little") >> 11) * 2.0**-53)


class Sampler:
    """Samples batches of logits of `vocab_size` tokens on `device`; keeps nothing between calls."""

    def __init__(self, vocab_size: int, device: torch.device | str) -> None:
        assert vocab_size >= 1
        self.vocab_size = vocab_size
        self.device = torch.device(device)

    def sample(self, logits: torch.Tensor, rows: Sequence[Row]) -> Sampled:
        """logits: [rows, vocab_size or more], float32 or shorter, not changed; columns beyond `vocab_size` are padding.

        Blocks until the tokens are on the host.
        """
        assert logits.device.type == self.device.type
        assert logits.dtype in (torch.float32, torch.bfloat16, torch.float16)
        assert logits.ndim == 2
        assert logits.shape[0] == len(rows)
        assert logits.shape[1] >= self.vocab_size
        logits_RV = logits[:, : self.vocab_size]
        num_at_once = max(1, _PART_LOGITS // self.vocab_size)
        if all(_is_plain(row) for row in rows):
            num_at_once = max(1, len(rows))
        token_ids: list[int] = []
        logprobs: list[Logprobs | None] = []
        for start in range(0, len(rows), num_at_once):
            part = slice(start, start + num_at_once)
            token_ids += _choose(logits_RV[part], rows[part])
            logprobs += _logprobs(logits_RV[part], rows[part], token_ids[part])
        broken = tuple(i for i, token_id in enumerate(token_ids) if token_id < 0)
        return Sampled(token_ids, logprobs, broken)


def _choose(raw_RV: torch.Tensor, rows: Sequence[Row]) -> list[int]:
    """Each row's token, -1 for a broken one. Where all are plainly greedy: one reduction, one copy to the host."""
    peak_R, best_R = raw_RV.max(dim=1)
    usable_R = peak_R.isfinite()
    logits_RV = raw_RV
    if any(map(_is_adjusted, rows)):
        logits_RV = _adjusted(raw_RV, rows)
        peak_R, best_R = logits_RV.max(dim=1)
        usable_R &= peak_R.isfinite()
    token_ids: list[int] = torch.where(usable_R, best_R, -1).tolist()
    groups: dict[tuple[bool, bool], list[int]] = {}
    for i, (row, token_id) in enumerate(zip(rows, token_ids, strict=True)):
        if token_id >= 0 and not row.params.is_greedy:
            groups.setdefault(kind_of(row.params, raw_RV.shape[1]), []).append(i)
    for members in groups.values():
        params = [rows[i].params for i in members]
        chosen_R = draw(logits_RV[members], peak_R[members], params, [rows[i].uniform for i in members])
        for i, token_id in zip(members, chosen_R.tolist(), strict=True):
            token_ids[i] = token_id
    return token_ids


def _adjusted(raw_RV: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """A float32 copy with biases, what may not come yet, and penalties."""
    logits_RV = raw_RV.to(torch.float32, copy=True)
    add_biases(logits_RV, {i: row.params.logit_bias for i, row in enumerate(rows) if row.params.logit_bias})
    forbid(
        logits_RV,
        {i: {*row.end_token_ids, *row.params.stop_token_ids} for i, row in enumerate(rows) if _is_too_short(row)},
    )
    penalize(logits_RV, [_penalty(i, row) for i, row in enumerate(rows) if _is_penalized(row.params)])
    return logits_RV


def _penalty(number: int, row: Row) -> Penalty:
    params = row.params
    prompt_ids = row.prompt_ids if params.repetition_penalty != 1 else ()
    return Penalty(
        number,
        params.repetition_penalty,
        params.frequency_penalty,
        params.presence_penalty,
        prompt_ids,
        row.output_ids,
    )


def _logprobs(raw_RV: torch.Tensor, rows: Sequence[Row], token_ids: Sequence[int]) -> list[Logprobs | None]:
    """For the rows that ask and are not broken; the sums are whole numbers (see filters), the logarithms the host's."""
    found: list[Logprobs | None] = [None] * len(rows)
    asking = [i for i, row in enumerate(rows) if row.params.logprobs is not None and token_ids[i] >= 0]
    if not asking:
        return found
    logits_RV = raw_RV[asking].float()
    vocab_size = logits_RV.shape[1]
    peak_R = logits_RV.amax(dim=1)
    totals = fixed_point(ratios_of(logits_RV, peak_R)).sum(dim=1).tolist()
    num_top = [min(rows[i].params.logprobs or 0, vocab_size) for i in asking]
    top_ids, top = _most_likely(logits_RV, max(num_top))
    chosen_R1 = torch.tensor([token_ids[i] for i in asking]).to(logits_RV.device)[:, None]
    chosen = logits_RV.gather(1, chosen_R1)[:, 0].tolist()
    for place, (i, peak) in enumerate(zip(asking, peak_R.tolist(), strict=True)):
        below = math.log(totals[place] / unit_of(vocab_size)) + peak
        num = num_top[place]
        values = [value - below for value in top[place][:num]]
        found[i] = Logprobs(chosen[place] - below, top_ids[place][:num], values)
    return found


def _most_likely(logits_RV: torch.Tensor, num: int) -> tuple[list[list[int]], list[list[float]]]:
    """Ids and logits of each row's `num` greatest, by a sort: torch.topk leaves open which of equal ones it takes."""
    if not num:
        nothing: list[list[int]] = [[] for _ in logits_RV]
        return nothing, [[] for _ in logits_RV]
    ordered_RV, order_RV = torch.sort(logits_RV, dim=1, descending=True, stable=True)
    return order_RV[:, :num].tolist(), ordered_RV[:, :num].tolist()


def _is_plain(row: Row) -> bool:
    return row.params.is_greedy and row.params.logprobs is None and not _is_adjusted(row)


def _is_adjusted(row: Row) -> bool:
    return bool(row.params.logit_bias) or _is_too_short(row) or _is_penalized(row.params)


def _is_too_short(row: Row) -> bool:
    return len(row.output_ids) < row.params.min_new_tokens


def _is_penalized(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0
