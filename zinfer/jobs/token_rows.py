"""Read the prompts of a JSONL file as token ids, to measure a model or to plan a job; and pad them."""

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
    """Return the token ids of each row, read like `zinfer run` does.

    Args:
        tokenizer: checkpoint folder with the tokenizer.
        model: rows must fit its positions and vocabulary.
        most_tokens: further limit for the length of a sequence.
        num_new_tokens: new tokens that must fit after each row.

    Raises:
        ConfigError: a row is invalid or does not fit (names its line), or the model is not a generating decoder.
    """
    if not is_generating_decoder(model):
        raise ConfigError(
            f"{prompts}: only generating decoders can be measured on prompts, and {type(model).__name__} is not one; "
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
    """Estimate the job of an input file from rows sampled over the whole file.

    Args:
        folder: checkpoint folder with the tokenizer.
        max_new_tokens: default for rows that do not set it.

    Returns:
        The job of the whole file, without rows that will fail; the number of sampled rows; and how many of these fail.

    Raises:
        UnusableInput: the file has no rows, or there is no tokenizer.
        ConfigError: none of the sampled rows is valid.
    """
    sample, num_rows = _read(input, folder, vocab_size, limits, max_new_tokens, _NUM_SAMPLED)
    sampled = list(sample)
    usable = [prompt for prompt in sampled if isinstance(prompt, Prompt)]
    prompts = [prompt for prompt in usable for _ in range(prompt.params.n)]
    if not prompts:
        why = next(each.message for each in sampled if isinstance(each, BadRow))
        raise ConfigError(f"{input}: none of {len(sampled):,} sampled rows can be used: {why}")
    num_sequences = round(num_rows * len(prompts) / len(sampled))
    job = Job(num_sequences, [len(each.token_ids) for each in prompts], [each.max_new_tokens for each in prompts])
    return job, len(sampled), len(sampled) - len(usable)


def _read(
    input: Path, tokenizer: Path, vocab_size: int, limits: LengthLimits, max_new_tokens: int, most: int | None = None
) -> tuple[Iterator[Prompt | BadRow], int]:
    """Return rows of the file (all, or about ``most`` spread over it), and the number of rows in the file."""
    reader = PromptReader(
        PromptEncoder(find_tokenizer(tokenizer), vocab_size, limits), scan_input(input), max_new_tokens
    )
    num_rows = reader.index.num_rows
    step = max(1, num_rows // most) if most else 1
    return map(reader.read, islice(read_lines(input), 0, None, step)), num_rows


def by_length(rows: Iterable[_T], length: Callable[[_T], int], most_tokens: int) -> list[list[_T]]:
    """Split the rows, shortest first, into parts of at most ``most_tokens``, padding included, or of one row."""
    parts: list[list[_T]] = []
    for row in sorted(rows, key=length):
        if not parts or (len(parts[-1]) + 1) * length(row) > most_tokens:
            parts.append([])
        parts[-1].append(row)
    return parts


def padded(
    rows: Sequence[Sequence[int]], pad_token_id: int = 0, side: str = "right"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad rows; return ids and mask [rows, longest].

    Padding on the right leaves a decoder's logits and positions unchanged. Pad on the left for `generate`, which
    continues after the last column.
    """
    options: dict[str, Any] = {"batch_first": True, "padding_side": side}
    ids = pad_sequence([torch.tensor(row) for row in rows], padding_value=pad_token_id, **options)
    return ids, pad_sequence([torch.ones(len(row), dtype=torch.int64) for row in rows], **options)
