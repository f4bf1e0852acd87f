"""The prompts of a JSONL as rows of token ids, for who measures a model on them."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from zinfer.errors import ConfigError
from zinfer.jobs.index import scan_input
from zinfer.jobs.prompts import PromptMaker
from zinfer.jobs.rows import BadRow, read_lines
from zinfer.model.context_length import read_limits
from zinfer.model.spec import is_generating_decoder


def read_token_rows(
    prompts: Path, tokenizer: Path, model: PreTrainedModel, most_tokens: int | None, num_new_tokens: int = 1
) -> list[tuple[int, ...]]:
    """The token ids of each row, which `zinfer run` would take.

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
    limits = read_limits(model, most_tokens)
    vocab_size = model.config.get_text_config().vocab_size
    maker = PromptMaker.from_folder(tokenizer, limits, vocab_size, num_new_tokens)
    index = scan_input(prompts)
    found: list[tuple[int, ...]] = []
    for line in read_lines(prompts):
        _, prompt = maker.prompt_of(line, index)
        if isinstance(prompt, BadRow):
            raise ConfigError(f"{prompts}: {prompt.message}; correct the row, or leave it out")
        found.append(prompt.token_ids)
    return found


def right_padded(rows: Sequence[Sequence[int]], pad_token_id: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask [rows, longest]; what comes behind a row changes none of a decoder's logits, and positions that are
    counted from the left stay as they are."""
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *[pad_token_id] * (longest - len(row))] for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    return ids, mask
