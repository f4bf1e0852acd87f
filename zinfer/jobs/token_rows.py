"""Read the prompts of a JSONL file as token ids, to measure a model or to plan a job; and pad them."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from zinfer.errors import ConfigError
from zinfer.jobs.index import scan_input
from zinfer.jobs.input_formats import open_rows
from zinfer.jobs.prompts import Prompt, PromptReader
from zinfer.jobs.request import InputFormat
from zinfer.jobs.row_form import RowForm
from zinfer.jobs.row_sample import RowSample
from zinfer.jobs.rows import BadRow, read_lines
from zinfer.model.context_length import read_limits
from zinfer.model.spec import is_generating_decoder
from zinfer.requests.length_limits import LengthLimits
from zinfer.requests.prompt_encoder import PromptEncoder, find_tokenizer

_T = TypeVar("_T")


def read_token_rows(
    prompts: Path, tokenizer: Path, model: PreTrainedModel, most_tokens: int | None, num_new_tokens: int = 1
) -> list[tuple[int, ...]]:
    """Return the token ids of each row, read like `zinfer run` does; for arguments and errors see `read_prompts`."""
    return [prompt.token_ids for prompt in read_prompts(prompts, tokenizer, model, most_tokens, num_new_tokens)]


def read_prompts(
    prompts: Path,
    tokenizer: Path,
    model: PreTrainedModel,
    most_tokens: int | None,
    num_new_tokens: int,
    *,
    generates: bool = False,
) -> list[Prompt]:
    """Return the rows of a file as prompts.

    Args:
        tokenizer: checkpoint folder with the tokenizer.
        model: rows must fit its positions and vocabulary.
        most_tokens: further limit for the length of a sequence.
        num_new_tokens: new tokens that must fit after each row.
        generates: whether rows that set ``max_new_tokens`` get so many instead.

    Raises:
        ConfigError: a row is invalid or does not fit (names its line), or the model is not a generating decoder.
    """
    if not is_generating_decoder(model):
        raise ConfigError(
            f"{prompts}: only generating decoders can be measured on prompts, and {type(model).__name__} is not one; "
            "leave the prompts out"
        )
    vocab_size, limits = model.config.get_text_config().vocab_size, read_limits(model, most_tokens)
    found: list[Prompt] = []
    with open_rows(prompts) as rows:
        reader = _reader_of(rows, prompts, tokenizer, vocab_size, limits, RowForm(num_new_tokens))
        for prompt in map(reader.read, read_lines(rows)):
            if isinstance(prompt, BadRow):
                raise ConfigError(f"{prompts}: {prompt.message}; correct the row, or leave it out")
            num_new = prompt.max_new_tokens if generates else num_new_tokens
            if problem := limits.problem(len(prompt.token_ids), num_new):
                raise ConfigError(f"{prompts}: line {prompt.line}: {problem}")
            found.append(prompt)
    return found


def sample_rows(
    input: Path,
    folder: Path,
    vocab_size: int,
    form: RowForm,
    limits: LengthLimits,
    *,
    input_format: InputFormat = InputFormat.AUTO,
    limit: int | None = None,
) -> RowSample:
    """Return rows from all over an input.

    Args:
        folder: checkpoint folder with the tokenizer.
        form: how rows become requests.
        input_format, limit: as for `open_rows`.

    Raises:
        UnusableInput: the file has no rows, or there is no tokenizer.
        ConfigError: none of the sampled rows is valid.
    """
    with open_rows(input, input_format, limit=limit) as rows:
        sample = RowSample.read(_reader_of(rows, input, folder, vocab_size, limits, form))
    if not sample.prompts:
        why = sample.bad[0].message
        raise ConfigError(f"{input}: none of {sample.num_read:,} sampled rows can be used: {why}")
    return sample


def _reader_of(
    rows: Path, name: Path, tokenizer: Path, vocab_size: int, limits: LengthLimits, form: RowForm
) -> PromptReader:
    encoder = PromptEncoder(find_tokenizer(tokenizer), vocab_size, limits)
    return PromptReader(encoder, scan_input(rows, name=name), form)


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
