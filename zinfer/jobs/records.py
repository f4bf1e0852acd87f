"""Output rows: each holds a prompt's completions or encoding, or an error.

A row has the format of its input row: the job's own, or OpenAI's.
"""

import json
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from zinfer.jobs.openai_response import OpenAIResponses, error_response, read_response
from zinfer.jobs.prompts import Prompt
from zinfer.jobs.rows import BadRow, Fault, RowId, RowState
from zinfer.requests.completion import Completion
from zinfer.requests.logprobs import Logprobs

_RESULTS: Final = ("token_ids", "outputs", "embedding", "scores")
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
    """The encoding of one prompt; no fields if there is an error."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None


class Records:
    """Writes and counts the rows of one job; thread-safe.

    Args:
        put: called with each row to write.

    Attributes:
        states: [num_rows] RowState by ordinal.
        num_prompt_tokens, num_output_tokens: tokens of the completed rows.
        failures: number of failed rows by reason.
    """

    def __init__(self, responses: OpenAIResponses, put: Callable[[Mapping[str, Any]], None], states: bytearray) -> None:
        self.states = states
        self.num_prompt_tokens = self.num_output_tokens = 0
        self.failures: Counter[str] = Counter()
        self._responses, self._put = responses, put
        self._lock = threading.Lock()

    def begin_batch(self, missing: Iterable[tuple[int, Prompt | BadRow]]) -> dict[int, int]:
        """Write the error rows; return the ordinals of the others by the identity of their prompts."""
        ordinals: dict[int, int] = {}
        for ordinal, item in missing:
            if isinstance(item, BadRow):
                record = _error(item.id, item.message)
                if item.is_openai:
                    record = error_response(item.id, item.message, item.fault)
                with self._lock:
                    self._fail(
                        ordinal, {**record, **item.kept}, "malformed" if item.is_malformed else _reason(item.message)
                    )
            else:
                ordinals[id(item)] = ordinal
        return ordinals

    def write(self, ordinal: int, prompt: Prompt, answer: Sequence[Completion] | Encoding) -> None:
        """Write the row of a completed or encoded prompt, or an error row if it failed."""
        with self._lock:
            self._write(ordinal, prompt, answer)

    def _write(self, ordinal: int, prompt: Prompt, answer: Sequence[Completion] | Encoding) -> None:
        row_id, form = prompt.row.id, prompt.row.openai
        parts: Sequence[Completion | Encoding] = [answer] if isinstance(answer, Encoding) else answer
        failed = next((each for each in parts if each.error is not None), None)
        if failed is not None and failed.error is not None:
            record = _error(row_id, f"line {prompt.line}: {failed.error}")
            if form is not None:
                told = form.names.error(failed.error)
                status = 400 if isinstance(failed, Completion) and failed.is_invalid else 500
                record = error_response(row_id, f"line {prompt.line}: {told}", Fault(status, told.field))
            self._fail(ordinal, {**record, **prompt.row.kept}, _reason(failed.error))
            return
        if isinstance(answer, Encoding):
            record = {"id": row_id, **answer.fields, "num_prompt_tokens": len(prompt.token_ids)}
        else:
            record = self._responses.completed(prompt, form, answer) if form else completed_record(prompt, answer)
            self.num_output_tokens += sum(len(each.token_ids) for each in answer)
        self._put({**record, **prompt.row.kept})
        self.num_prompt_tokens += len(prompt.token_ids)
        self.states[ordinal] = RowState.DONE

    def _fail(self, ordinal: int, record: Mapping[str, Any], reason: str) -> None:
        self._put(record)
        self.states[ordinal] = RowState.FAILED
        self.failures[reason] += 1


def completed_record(prompt: Prompt, completions: Sequence[Completion]) -> dict[str, Any]:
    """Return a completed row in the job's own format.

    Several completions (``n``) are a list under ``outputs``; a single one is in the row itself.
    """
    sizes = {
        "num_prompt_tokens": len(prompt.token_ids),
        "num_output_tokens": sum(len(each.token_ids) for each in completions),
    }
    if len(completions) > 1:
        return {"id": prompt.row.id, "outputs": [_output(each) for each in completions], **sizes}
    output = _output(completions[0])
    return {"id": prompt.row.id, "text": output.pop("text"), "token_ids": output.pop("token_ids"), **sizes, **output}


def encode_row(row: Mapping[str, Any]) -> bytes:
    """Encode one output line. A lone surrogate, which UTF-8 cannot hold, becomes a JSON escape."""
    text = json.dumps(row, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace") + b"\n"


def read_record(record: Any) -> tuple[RowId, bool]:
    """Return the id of an output row, and whether it is an error row.

    Raises:
        ValueError: zinfer does not write such rows.
    """
    match record:
        case {"custom_id": str()}:
            return read_response(record)
        case {"id": str() | int() as row_id}:
            if (is_error := "error" in record) != any(name in record for name in _RESULTS):
                return row_id, is_error
            raise ValueError("neither a completion nor an error")
    raise ValueError("no row with an id")


def read_token_ids(record: Any) -> tuple[tuple[int, ...], ...] | None:
    """Return the tokens of each completion in an output row; None if it has not as many as it says."""
    match record:
        case {
            "custom_id": _,
            "token_ids": list(several),
            "response": {"body": {"usage": {"completion_tokens": num_tokens}}},
        }:
            pass
        case {"outputs": [*outputs], "num_output_tokens": num_tokens}:
            several = [each.get("token_ids") if isinstance(each, dict) else None for each in outputs]
        case {"token_ids": ids, "num_output_tokens": num_tokens}:
            several = [ids]
        case _:
            return None
    if not all(isinstance(ids, list) and all(type(each) is int for each in ids) for ids in several):
        return None
    return tuple(map(tuple, several)) if sum(map(len, several)) == num_tokens else None


def _error(row_id: RowId, message: str) -> dict[str, Any]:
    return {"id": row_id, "error": message}


def _output(completion: Completion) -> dict[str, Any]:
    found: dict[str, Any] = {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }
    if completion.logprobs is not None:
        found["logprobs"] = [_logprobs(each) for each in completion.logprobs]
    if completion.prompt_logprobs is not None:
        found["prompt_logprobs"] = [None if each is None else _logprobs(each) for each in completion.prompt_logprobs]
    return found


def _logprobs(each: Logprobs) -> dict[str, Any]:
    """Return a token's log-probability and the top tokens' ids and log-probabilities; null for a probability of 0."""
    top = [[token_id, _finite(logprob)] for token_id, logprob in zip(each.top_ids, each.top, strict=True)]
    return {"logprob": _finite(each.chosen), "top": top}


def _finite(logprob: float) -> float | None:
    """Replace -inf by None: JSON has no infinity."""
    return None if logprob == -math.inf else logprob


def _reason(error: str) -> str:
    """Return the category of a row's error, for the summary."""
    return next((reason for words, reason in _WORDS if words in error), "other")
