"""The prompts of a JSONL as rows of token ids: to measure a model on them, or to plan a job; and their padding."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import torch
from transformers import PreTrainedModel

from zinfer.errors import ConfigError
from zinfer.jobs.index import scan_input
from zinfer.jobs.prompts import Prompt, PromptReader
from zinfer.jobs.rows import BadRow, read_lines
from zinfer.model.context_length import read_limits
from zinfer.model.spec import is_generating_decoder
from zinfer.planning.job_plan import Job
from zinfer.requests.length_limits import LengthLimits
from zinfer.requests.prompt_encoder import PromptEncoder, find_tokenizer

_NUM_SAMPLED: Final = 1000


def read_token_rows(
    prompts: Path, tokenizer: Path, model: PreTrainedModel, most_tokens: int | None, num_new_tokens: int = 1
) -> list[tuple[int, ...]]:
    """Return the token ids of each row, as `zinfer run` reads them.

    Args:
        tokenizer: folder of the checkpoint that has it.
        model: whose positions and vocabulary they have to fit.
        most_tokens: of a sequence, beside the model's positions.
        num_new_tokens: that are to fit behind each row.

    Raises:
        ConfigError: a row is no prompt, or does not fit; names its line. Or the model is no decoder that generates.
    """
    if not is_generating_decoder(model):
        raise ConfigError(
            f"{prompts}: only decoders that generate are measured on prompts, and a {type(model).__name__} is none; "
            "leave the prompts out"
        )
    reader = _reader(
        prompts, tokenizer, model.config.get_text_config().vocab_size, read_limits(model, most_tokens), num_new_tokens
    )
    found: list[tuple[int, ...]] = []
    for line in read_lines(prompts):
        prompt = reader.read(line)
        if isinstance(prompt, BadRow):
            raise ConfigError(f"{prompts}: {prompt.message}; correct the row, or leave it out")
        found.append(prompt.token_ids)
    return found


class Sample(NamedTuple):
    """What a sample of an input says.

    job: of the whole file, without rows that get an error in place of an answer.
    num_rows: that were looked at.
    num_unusable: of these, that get an error.
    """

    job: Job
    num_rows: int
    num_unusable: int


def sample_lengths(input: Path, folder: Path, vocab_size: int, max_new_tokens: int, limits: LengthLimits) -> Sample:
    """Return the job of an input file, by a sample of its rows spread over the whole file.

    Args:
        folder: of the checkpoint, with its tokenizer.
        vocab_size: of the model.
        max_new_tokens: for rows that do not say themselves.
        limits: of lengths.

    Raises:
        UnusableInput: no rows, or no tokenizer.
        ConfigError: none of the sampled rows can be used.
    """
    reader = _reader(input, folder, vocab_size, limits, max_new_tokens)
    num_rows = reader.index.num_rows
    step = max(1, num_rows // _NUM_SAMPLED)
    sampled = [reader.read(line) for number, line in enumerate(read_lines(input)) if number % step == 0]
    usable = [prompt for prompt in sampled if isinstance(prompt, Prompt)]
    prompts = [prompt for prompt in usable for _ in range(prompt.params.n)]
    if not prompts:
        why = next(each.message for each in sampled if isinstance(each, BadRow))
        raise ConfigError(f"{input}: none of {len(sampled):,} rows that were looked at can be used: {why}")
    num_texts = round(num_rows * len(prompts) / len(sampled))
    job = Job(num_texts, [len(each.token_ids) for each in prompts], [each.max_new_tokens for each in prompts])
    return Sample(job, len(sampled), len(sampled) - len(usable))


def _reader(input: Path, tokenizer: Path, vocab_size: int, limits: LengthLimits, max_new_tokens: int) -> PromptReader:
    encoder = PromptEncoder(find_tokenizer(tokenizer), vocab_size, limits)
    return PromptReader(encoder, scan_input(input), max_new_tokens)


def right_padded(rows: Sequence[Sequence[int]], pad_token_id: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask [rows, longest]; what comes behind a row changes none of a decoder's logits, and positions that are
    counted from the left stay as they are."""
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *[pad_token_id] * (longest - len(row))] for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    return ids, mask


def left_padded(rows: Sequence[Sequence[int]], pad_token_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask [rows, longest], for `generate`, which goes on behind the last column."""
    longest = max(map(len, rows))
    ids = torch.tensor([[*[pad_token_id] * (longest - len(row)), *row] for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    return ids, mask
