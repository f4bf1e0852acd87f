"""The prompts of a JSONL as rows of token ids: to measure a model on them, or to plan a job; and their padding."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from torch.nn.utils.rnn import pad_sequence
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
_T = TypeVar("_T")


def read_token_rows(
    prompts: Path, tokenizer: Path, model: PreTrainedModel, most_tokens: int | None, num_new_tokens: int = 1
) -> list[tuple[int, ...]]:
    """Return the token ids of each row, as `zinfer run` reads them.

    Args:
        tokenizer: folder of the checkpoint that has it.
        model: whose positions and vocabulary they have to fit.
        most_tokens: of a sequence, beside the model's positions.
        num_new_tokens: that must fit after each row.

    Raises:
        ConfigError: a row is no prompt, or does not fit; names its line. Or the model is no decoder that generates.
    """
    if not is_generating_decoder(model):
        raise ConfigError(
            f"{prompts}: only decoders that generate are measured on prompts, and a {type(model).__name__} is none; "
            "leave the prompts out"
        )
    vocab_size, limits = model.config.get_text_config().vocab_size, read_limits(model, most_tokens)
    found: list[tuple[int, ...]] = []
    for prompt in _read(prompts, tokenizer, vocab_size, limits, num_new_tokens)[0]:
        if isinstance(prompt, BadRow):
            raise ConfigError(f"{prompts}: {prompt.message}; correct the row, or leave it out")
        found.append(prompt.token_ids)
    return found


def sample_lengths(
    input: Path, folder: Path, vocab_size: int, max_new_tokens: int, limits: LengthLimits
) -> tuple[Job, int, int]:
    """Return the job of an input file, by a sample of its rows spread over the whole file.

    Args:
        folder: of the checkpoint, with its tokenizer.
        max_new_tokens: default for rows that do not set it.

    Returns:
        The job of the whole file, without rows that get an error in place of an answer; how many rows were looked at;
        and how many of these get an error.

    Raises:
        UnusableInput: no rows, or no tokenizer.
        ConfigError: none of the sampled rows can be used.
    """
    sample, num_rows = _read(input, folder, vocab_size, limits, max_new_tokens, _NUM_SAMPLED)
    sampled = list(sample)
    usable = [prompt for prompt in sampled if isinstance(prompt, Prompt)]
    prompts = [prompt for prompt in usable for _ in range(prompt.params.n)]
    if not prompts:
        why = next(each.message for each in sampled if isinstance(each, BadRow))
        raise ConfigError(f"{input}: none of {len(sampled):,} rows that were looked at can be used: {why}")
    num_sequences = round(num_rows * len(prompts) / len(sampled))
    job = Job(num_sequences, [len(each.token_ids) for each in prompts], [each.max_new_tokens for each in prompts])
    return job, len(sampled), len(sampled) - len(usable)


def _read(
    input: Path, tokenizer: Path, vocab_size: int, limits: LengthLimits, max_new_tokens: int, most: int | None = None
) -> tuple[Iterator[Prompt | BadRow], int]:
    """The rows, about ``most`` of them spread over the file, and how many the file has."""
    reader = PromptReader(
        PromptEncoder(find_tokenizer(tokenizer), vocab_size, limits), scan_input(input), max_new_tokens
    )
    num_rows = reader.index.num_rows
    step = max(1, num_rows // most) if most else 1
    return map(reader.read, islice(read_lines(input), 0, None, step)), num_rows


def by_length(rows: Iterable[_T], length: Callable[[_T], int], most_tokens: int) -> list[list[_T]]:
    """The rows, shortest first, in parts of no more tokens than that, padding included, or of one row."""
    parts: list[list[_T]] = []
    for row in sorted(rows, key=length):
        if not parts or (len(parts[-1]) + 1) * length(row) > most_tokens:
            parts.append([])
        parts[-1].append(row)
    return parts


def padded(
    rows: Sequence[Sequence[int]], pad_token_id: int = 0, side: str = "right"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask [rows, longest].

    Padding on the right changes none of a decoder's logits, and positions that are counted from the left stay as they
    are; on the left, `generate` continues after the last column.
    """
    options: dict[str, Any] = {"batch_first": True, "padding_side": side}
    ids = pad_sequence([torch.tensor(row) for row in rows], padding_value=pad_token_id, **options)
    return ids, pad_sequence([torch.ones(len(row), dtype=torch.int64) for row in rows], **options)
