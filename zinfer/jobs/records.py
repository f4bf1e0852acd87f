"""The rows of the output: each a prompt's completions or encoding, or an error.

Rows are written in the form in which they were asked: the job's own, or OpenAI's.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from zinfer.jobs.openai_response import OpenAIResponses
from zinfer.jobs.prompts import Prompt
from zinfer.jobs.rows import BadRow, RowState
from zinfer.jobs.writer import RowWriter
from zinfer.requests.completion import Completion, not_finite
from zinfer.requests.logprobs import Logprobs

_WORDS: Final = (
    ("not finite", "no finite logits"),
    ("more than", "too long"),
    ("leaves no room", "too long"),
    ("KV cache", "too long"),
    ("template", "refused by the chat template"),
    ("has no tokens", "empty"),
    ("token ids", "unknown token ids"),
)


@dataclass(frozen=True)
class Encoding:
    """Of one text; no fields where there is an error."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None

    def broken_by(self, name: str | None) -> "Encoding":
        """The same, which has an error, with what gave the first of the numbers that are none, if that was seen."""
        return replace(self, error=not_finite(name, str(self.error)))


class Records:
    """Writes the rows of one job, and counts them.

    Attributes:
        states: [num_rows] RowState by ordinal.
        num_prompt_tokens, num_output_tokens: of the rows that were completed.
        failures: how many rows failed, by reason.
    """

    def __init__(self, responses: OpenAIResponses, writer: RowWriter, states: bytearray) -> None:
        self.states = states
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0
        self.failures: Counter[str] = Counter()
        self._responses = responses
        self._writer = writer

    def begin_batch(self, missing: Iterable[tuple[int, Prompt | BadRow]]) -> dict[int, int]:
        """Write the rows that cannot be used; return the ordinals of the others, by the identity of their prompts."""
        ordinals: dict[int, int] = {}
        for ordinal, item in missing:
            if isinstance(item, BadRow):
                self._writer.put(refused_record(item, self._responses))
                self._fail(ordinal, "malformed" if item.is_malformed else _reason(item.message))
            else:
                ordinals[id(item)] = ordinal
        return ordinals

    def write(self, ordinal: int, prompt: Prompt, answer: Sequence[Completion] | Encoding) -> None:
        """Write the row of a prompt that was completed or encoded; an error row where that failed."""
        self._writer.put(answered_record(prompt, answer, self._responses))
        if (error := first_error(answer)) is not None:
            self._fail(ordinal, _reason(error))
            return
        self.states[ordinal] = RowState.DONE
        self.num_prompt_tokens += len(prompt.token_ids)
        if not isinstance(answer, Encoding):
            self.num_output_tokens += sum(len(each.token_ids) for each in answer)

    def _fail(self, ordinal: int, reason: str) -> None:
        self.states[ordinal] = RowState.FAILED
        self.failures[reason] += 1


def refused_record(bad: BadRow, responses: OpenAIResponses) -> dict[str, Any]:
    """The row of a line that cannot be used."""
    return responses.refused(bad) if bad.is_openai else {"id": bad.id, "error": bad.message}


def answered_record(
    prompt: Prompt, answer: Sequence[Completion] | Encoding, responses: OpenAIResponses
) -> dict[str, Any]:
    """The row of a prompt that was completed or encoded, in the form in which it was asked."""
    form, error = prompt.row.openai, first_error(answer)
    if isinstance(answer, Encoding) or form is None:
        if error is not None:
            return {"id": prompt.row.id, "error": f"line {prompt.line}: {error}"}
        return encoded_record(prompt, answer) if isinstance(answer, Encoding) else completed_record(prompt, answer)
    if error is not None:
        return responses.failed(prompt.row.id, f"line {prompt.line}: {error}")
    return responses.completed(prompt, form, answer)


def first_error(completions: Sequence[Completion] | Encoding) -> str | None:
    """Why a row has no completions; None where it has all of them."""
    if isinstance(completions, Encoding):
        return completions.error
    return next((each.error for each in completions if each.error is not None), None)


def completed_record(prompt: Prompt, completions: Sequence[Completion]) -> dict[str, Any]:
    """A completed row in the job's own form.

    Several completions (``n``) lie side by side under ``outputs``, one alone in the row itself.
    """
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
    return {"id": prompt.row.id, **encoding.fields, "num_prompt_tokens": len(prompt.token_ids)}


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


def _reason(error: str) -> str:
    """The kind of a row's error, for the summary; the row says it in full."""
    return next((reason for words, reason in _WORDS if words in error), "other")
