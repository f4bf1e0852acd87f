"""Changes logits before a token is chosen: biases, forbidden tokens, penalties.

Each function changes float32 logits [rows, vocabulary] in place, for all rows that ask for it at once; a row's result
does not depend on other rows. Token ids outside the vocabulary are ignored.
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import torch

from zinfer.requests.sampling_params import SamplingParams
from zinfer.sampling.async_copy import send, send_pinned


class Penalty(NamedTuple):
    """A row's penalties, and the tokens that they apply to. row: its index in the logits."""

    row: int
    params: SamplingParams
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]


def add_biases(logits_RV: torch.Tensor, biases: Mapping[int, Mapping[int, float]]) -> None:
    """Add to each row its biases by token id."""
    entries = [
        (row, token_id, bias)
        for row, biases_of_row in biases.items()
        for token_id, bias in biases_of_row.items()
        if token_id < logits_RV.shape[1]
    ]
    if not entries:
        return
    rows, token_ids, values = zip(*entries, strict=True)
    places = _index(rows, logits_RV), _index(token_ids, logits_RV)
    logits_RV[places] += send(values, torch.float32, logits_RV.device)


def forbid(logits_RV: torch.Tensor, token_ids: Mapping[int, Collection[int]]) -> None:
    """Set the logits of each row's `token_ids` to -inf."""
    entries = [(row, i) for row, ids in token_ids.items() for i in ids if 0 <= i < logits_RV.shape[1]]
    if not entries:
        return
    rows, columns = zip(*entries, strict=True)
    logits_RV[_index(rows, logits_RV), _index(columns, logits_RV)] = -torch.inf


def keep_only(logits_RV: torch.Tensor, token_ids: Mapping[int, Collection[int]]) -> None:
    """Set the logits of these rows to -inf, except those of each row's `token_ids`."""
    if not token_ids:
        return
    entries = [(row, i) for row, ids in token_ids.items() for i in ids if 0 <= i < logits_RV.shape[1]]
    rows = _index([row for row, _ in entries], logits_RV)
    columns = _index([i for _, i in entries], logits_RV)
    kept = logits_RV[rows, columns]
    logits_RV[_index(list(token_ids), logits_RV)] = -torch.inf
    logits_RV[rows, columns] = kept


def keep_masked(logits_RV: torch.Tensor, rows: Sequence[int], masks_MW: torch.Tensor) -> None:
    """Set the logits of these rows to -inf, except those of the tokens in their masks.

    masks_MW: [rows, words] int32 on the host, as of `token_masks`; pinned if the logits are on a GPU.
    """
    bits_MB = send_pinned(masks_MW, logits_RV.device).view(torch.uint8)
    shifts = torch.arange(8, dtype=torch.uint8, device=logits_RV.device)
    allowed_MV = (bits_MB[:, :, None] >> shifts & 1).flatten(1)[:, : logits_RV.shape[1]].bool()
    places = _index(rows, logits_RV)
    logits_RV[places] = logits_RV[places].masked_fill_(~allowed_MV, -torch.inf)


def penalize(logits_RV: torch.Tensor, penalties: Sequence[Penalty]) -> None:
    """Apply repetition penalties like transformers (prompt and output), then frequency and presence like OpenAI."""
    if not penalties:
        return
    rows = _index([penalty.row for penalty in penalties], logits_RV)
    params = [penalty.params for penalty in penalties]
    penalized_RV = logits_RV[rows]
    counts_RV = _counts([penalty.output_ids for penalty in penalties], penalized_RV)
    prompts = [penalty.prompt_ids if penalty.params.repetition_penalty != 1 else () for penalty in penalties]
    repeated_RV = (counts_RV + _counts(prompts, penalized_RV)) > 0
    repetition_R1 = _column([each.repetition_penalty for each in params], penalized_RV)
    lowered_RV = torch.where(penalized_RV < 0, penalized_RV * repetition_R1, penalized_RV / repetition_R1)
    penalized_RV = torch.where(repeated_RV, lowered_RV, penalized_RV)
    penalized_RV -= _column([each.frequency_penalty for each in params], penalized_RV) * counts_RV
    penalized_RV -= _column([each.presence_penalty for each in params], penalized_RV) * (counts_RV > 0)
    logits_RV[rows] = penalized_RV


def _counts(token_ids: Sequence[Sequence[int]], like_RV: torch.Tensor) -> torch.Tensor:
    """Return how often each token occurs in each row's ids: [rows, vocabulary] int32, so sums are exact."""
    num_rows, vocab_size = like_RV.shape
    rows = _index([row for row, ids in enumerate(token_ids) for _ in ids], like_RV)
    columns = _index(list(chain.from_iterable(token_ids)), like_RV)
    inside = ((columns >= 0) & (columns < vocab_size)).to(torch.int32)
    places = rows * vocab_size + columns.clamp(0, vocab_size - 1)
    counts = torch.zeros(num_rows * vocab_size, dtype=torch.int32, device=like_RV.device)
    return counts.scatter_add_(0, places, inside).view(num_rows, vocab_size)


def _index(numbers: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    return send(numbers, torch.int64, like.device)


def _column(values: Sequence[float], like_RV: torch.Tensor) -> torch.Tensor:
    return send(values, torch.float32, like_RV.device)[:, None]
