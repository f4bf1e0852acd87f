"""The prompts of a bench, random or of a file, and the share of them that a group of ranks computes."""

from pathlib import Path
from typing import Final, NamedTuple

import torch
from transformers import PreTrainedModel

from zinfer.errors import ConfigError
from zinfer.jobs.bench_request import BenchRequest
from zinfer.jobs.token_rows import read_prompts
from zinfer.model.context_length import read_limits
from zinfer.ranks.mesh import Mesh

_SEED: Final = 0


class BenchPrompt(NamedTuple):
    """A prompt, and the number of tokens generated after it."""

    token_ids: tuple[int, ...]
    new_tokens: int


def prompts_of(
    request: BenchRequest, folder: Path, model: PreTrainedModel, most_tokens: int | None
) -> list[BenchPrompt]:
    """Return all prompts that a bench asks for.

    Args:
        folder: with the tokenizer, for a file of prompts.
        model: prompts must fit its positions and vocabulary.
        most_tokens: further limit for the length of a sequence.

    Raises:
        ConfigError: a prompt is invalid or does not fit, or rows ask for what a bench does not measure.
    """
    if request.input is not None:
        return _read(request, request.input, folder, model, most_tokens)
    if problem := read_limits(model, most_tokens).problem(request.prompt_len, request.new_tokens):
        raise ConfigError(f"--prompt-len and --new-tokens: {problem}")
    vocab_size = int(model.config.get_text_config().vocab_size)
    shape = (request.rows or 0, request.prompt_len)
    drawn = torch.randint(0, vocab_size, shape, generator=torch.Generator().manual_seed(_SEED))
    return [BenchPrompt(tuple(row), request.new_tokens) for row in drawn.tolist()]


def _read(
    request: BenchRequest, input: Path, folder: Path, model: PreTrainedModel, most_tokens: int | None
) -> list[BenchPrompt]:
    prompts = read_prompts(input, folder, model, most_tokens, request.new_tokens, generates=True)
    for prompt in prompts:
        if prompt.row.params.n > 1:
            raise ConfigError(
                f"{input}: line {prompt.line}: n is {prompt.row.params.n}, and a bench generates one text a row; "
                "repeat the row instead"
            )
    found = [BenchPrompt(prompt.token_ids, prompt.max_new_tokens) for prompt in prompts]
    if request.compare and (others := {each.new_tokens for each in found} - {request.new_tokens}):
        raise ConfigError(
            f"{input}: rows ask for {min(others)} new tokens and others for {request.new_tokens} (--new-tokens); "
            "rivals generate as many for each: remove max_new_tokens from the rows, or leave out --compare"
        )
    return found


def share_of(prompts: list[BenchPrompt], share: int, mesh: Mesh, request: BenchRequest) -> list[BenchPrompt]:
    """Return the prompts of a group of ranks: every so many of them.

    Raises:
        ConfigError: a group would have none.
    """
    if len(prompts) < mesh.num_shares:
        remedy = f"give --rows {mesh.num_shares} at least"
        if request.input is not None:
            most = len(prompts) * mesh.num_in_step
            remedy = f"add rows to {request.input} until it has {mesh.num_shares}, or give --ranks {most} at most"
        raise ConfigError(f"{len(prompts)} prompts are too few for {mesh.size} ranks; {remedy}")
    return prompts[share :: mesh.num_shares]
