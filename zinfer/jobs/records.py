"""A row of the output: a prompt's completions, or an error; and what such a row says when a job is picked up again."""

from collections.abc import Mapping, Sequence
from typing import Any

from zinfer.batching.completion import Completion
from zinfer.batching.sampler import Logprobs
from zinfer.jobs.prompts import Prompt
from zinfer.jobs.rows import BadRow


def completed_record(prompt: Prompt, completions: Sequence[Completion]) -> dict[str, Any]:
    """The row of a prompt that was completed; an error row where a completion is one.

    Several completions (``n``) lie side by side under ``outputs``, one alone in the row itself.
    """
    errors = [each.error for each in completions if each.error is not None]
    if errors:
        return {"id": prompt.row.id, "error": errors[0]}
    sizes = {
        "num_prompt_tokens": len(prompt.token_ids),
        "num_output_tokens": sum(len(each.token_ids) for each in completions),
    }
    if len(completions) > 1:
        return {"id": prompt.row.id, "outputs": [_output(each) for each in completions], **sizes}
    output = _output(completions[0])
    return {"id": prompt.row.id, "text": output.pop("text"), "token_ids": output.pop("token_ids"), **sizes, **output}


def error_record(bad: BadRow) -> dict[str, Any]:
    """The row of a line that cannot be used."""
    return {"id": bad.id, "error": bad.message}


def is_error(record: Mapping[str, Any]) -> bool:
    """Whether a row of the output says what went wrong.

    Raises:
        ValueError: it is no such row.
    """
    if ("error" in record) == ("token_ids" in record or "outputs" in record):
        raise ValueError("neither a completion nor an error")
    return "error" in record


def _output(completion: Completion) -> dict[str, Any]:
    found: dict[str, Any] = {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
    }
    if completion.logprobs is not None:
        found["logprobs"] = [_logprobs(each) for each in completion.logprobs]
    return found


def _logprobs(each: Logprobs) -> dict[str, Any]:
    """Of a token: its own log-probability, and the most likely tokens' beside their ids."""
    return {"logprob": each.chosen, "top": [list(pair) for pair in zip(each.top_ids, each.top, strict=True)]}
