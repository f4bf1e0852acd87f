"""A row of the output: a prompt's completions, or an error; and what such a row says when a job is picked up again.

Rows are written in the form in which they were asked: the job's own, or OpenAI's.
"""

import math
from collections.abc import Sequence
from typing import Any, Final

from zinfer.jobs.encoding import Encoding
from zinfer.jobs.openai_response import OpenAIResponses, read_response
from zinfer.jobs.prompts import Prompt
from zinfer.jobs.rows import BadRow, RowId
from zinfer.requests.completion import Completion
from zinfer.requests.logprobs import Logprobs

_RESULTS: Final = ("token_ids", "outputs", "embedding", "scores")


class Records:
    """Makes the rows of one job."""

    def __init__(self, responses: OpenAIResponses) -> None:
        self._responses = responses

    def completed(self, prompt: Prompt, answer: Sequence[Completion] | Encoding) -> dict[str, Any]:
        """The row of a prompt that was completed or encoded; an error row where that failed."""
        if isinstance(answer, Encoding):
            return encoded_record(prompt, answer)
        if prompt.row.openai is None:
            return completed_record(prompt, answer)
        error = first_error(answer)
        if error is not None:
            return self._responses.failed(prompt.row.id, f"line {prompt.line}: {error}")
        return self._responses.completed(prompt, prompt.row.openai, answer)

    def refused(self, bad: BadRow) -> dict[str, Any]:
        """The row of a line that cannot be used."""
        return self._responses.refused(bad) if bad.is_openai else {"id": bad.id, "error": bad.message}


def first_error(completions: Sequence[Completion] | Encoding) -> str | None:
    """Why a row has no completions; None where it has all of them."""
    if isinstance(completions, Encoding):
        return completions.error
    return next((each.error for each in completions if each.error is not None), None)


def completed_record(prompt: Prompt, completions: Sequence[Completion]) -> dict[str, Any]:
    """A completed row in the job's own form.

    Several completions (``n``) lie side by side under ``outputs``, one alone in the row itself.
    """
    error = first_error(completions)
    if error is not None:
        return {"id": prompt.row.id, "error": f"line {prompt.line}: {error}"}
    sizes = {
        "num_prompt_tokens": len(prompt.token_ids),
        "num_output_tokens": sum(len(each.token_ids) for each in completions),
    }
    if len(completions) > 1:
        return {"id": prompt.row.id, "outputs": [_output(each) for each in completions], **sizes}
    output = _output(completions[0])
    return {"id": prompt.row.id, "text": output.pop("text"), "token_ids": output.pop("token_ids"), **sizes, **output}


def encoded_record(prompt: Prompt, encoding: Encoding) -> dict[str, Any]:
    """A row with an embedding, or a label and scores."""
    if encoding.error is not None:
        return {"id": prompt.row.id, "error": f"line {prompt.line}: {encoding.error}"}
    return {"id": prompt.row.id, **encoding.fields, "num_prompt_tokens": len(prompt.token_ids)}


def read_record(record: Any) -> tuple[RowId, bool]:
    """A written row's id, and whether the row says what went wrong.

    Raises:
        ValueError: no job writes such a row.
    """
    match record:
        case {"custom_id": str()}:
            return read_response(record)
        case {"id": str() | int() as row_id}:
            if (is_error := "error" in record) != any(name in record for name in _RESULTS):
                return row_id, is_error
            raise ValueError("neither a completion nor an error")
    raise ValueError("no row with an id")


def _output(completion: Completion) -> dict[str, Any]:
    found: dict[str, Any] = {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }
    if completion.logprobs is not None:
        found["logprobs"] = [_logprobs(each) for each in completion.logprobs]
    return found


def _logprobs(each: Logprobs) -> dict[str, Any]:
    """Of a token: its own log-probability, and the most likely tokens' beside their ids; null for one of 0."""
    top = [[token_id, _finite(logprob)] for token_id, logprob in zip(each.top_ids, each.top, strict=True)]
    return {"logprob": _finite(each.chosen), "top": top}


def _finite(logprob: float) -> float | None:
    """JSON has no infinity."""
    return None if logprob == -math.inf else logprob
