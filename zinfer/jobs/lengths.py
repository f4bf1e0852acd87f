"""How long the prompts of an input are, from a sample of its rows spread over the whole file."""

from pathlib import Path
from typing import Final, NamedTuple

from zinfer.errors import ConfigError
from zinfer.jobs.index import scan_input
from zinfer.jobs.prompts import Prompt, PromptMaker
from zinfer.jobs.rows import BadRow, read_lines
from zinfer.planning.job_plan import Job
from zinfer.requests.length_limits import LengthLimits

_NUM_SAMPLED: Final = 1000


class Sample(NamedTuple):
    """What a sample says.

    job: of the whole file, without rows that get an error in place of an answer.
    num_rows: that were looked at.
    num_unusable: of these, that get an error.
    """

    job: Job
    num_rows: int
    num_unusable: int


def sample_lengths(input: Path, folder: Path, vocab_size: int, max_new_tokens: int, limits: LengthLimits) -> Sample:
    """The job of an input file.

    Args:
        folder: of the checkpoint, with its tokenizer.
        vocab_size: of the model.
        max_new_tokens: for rows that do not say themselves.
        limits: of a row.

    Raises:
        UnusableInput: no rows, or no tokenizer.
        ConfigError: none of the sampled rows can be used.
    """
    index = scan_input(input)
    maker = PromptMaker.from_folder(folder, limits, vocab_size, max_new_tokens)
    step = max(1, index.num_rows // _NUM_SAMPLED)
    sampled = [maker.prompt_of(line, index)[1] for number, line in enumerate(read_lines(input)) if number % step == 0]
    usable = [prompt for prompt in sampled if isinstance(prompt, Prompt)]
    prompts = [prompt for prompt in usable for _ in range(prompt.params.n)]
    if not prompts:
        why = next(each.message for each in sampled if isinstance(each, BadRow))
        raise ConfigError(f"{input}: none of {len(sampled):,} rows that were looked at can be used: {why}")
    num_rows = round(index.num_rows * len(prompts) / len(sampled))
    job = Job(num_rows, [len(each.token_ids) for each in prompts], [each.max_new_tokens for each in prompts])
    return Sample(job, len(sampled), len(sampled) - len(usable))
