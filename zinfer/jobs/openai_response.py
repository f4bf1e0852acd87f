"""Write rows in the OpenAI format: lines of a batch output file."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from zinfer.jobs.openai_batch import OpenAIForm
from zinfer.jobs.prompts import Prompt
from zinfer.jobs.rows import Fault, RowId, id_key
from zinfer.requests.completion import Completion
from zinfer.requests.openai_choice import Echo, OpenAIChoices, usage
from zinfer.requests.tool_formats import tool_format_of
from zinfer.requests.tool_parser import ids_of, open_parser, with_calls

_KINDS: Final = {400: "invalid_request_error", 404: "not_found_error", 500: "server_error"}
"""OpenAI's words for errors, by status: an invalid request, another model's name, a failure of the model."""


class OpenAIResponses:
    """Builds the output rows of one job.

    Args:
        began: start of the job, ``created`` in every row, so that a resumed job writes the same bytes.
        model_name: default for rows that name no model.
        tokenizer: used only by the calling thread.
        has_token_ids: whether rows have the tokens of their choices, beside OpenAI's fields.
    """

    def __init__(self, began: datetime, model_name: str, tokenizer: Any, *, has_token_ids: bool = False) -> None:
        self._created = int(began.timestamp())
        self._model_name, self._has_token_ids = model_name, has_token_ids
        self._tokenizer = tokenizer
        self._choices = OpenAIChoices(tokenizer)

    def completed(self, prompt: Prompt, form: OpenAIForm, completions: Sequence[Completion]) -> dict[str, Any]:
        """Return the output row of a prompt with all its completions."""
        skips_special, echo = prompt.params.skip_special_tokens, None
        if form.echoes:
            text = prompt.row.prompt
            echo = Echo(self._tokenizer.decode(prompt.token_ids) if text is None else text, prompt.token_ids)
        body = {
            "id": f"{'chatcmpl' if form.is_chat else 'cmpl'}-{_hash(prompt.row.id)}",
            "object": "chat.completion" if form.is_chat else "text_completion",
            "created": self._created,
            "model": self._model_name if form.model is None else form.model,
            "choices": [
                self._with_calls(
                    self._choices.whole(each, is_chat=form.is_chat, skips_special=skips_special, echo=echo),
                    prompt,
                    form,
                )
                for each in completions
            ],
            "usage": usage(len(prompt.token_ids), sum(len(each.token_ids) for each in completions)),
        }
        row = _row(prompt.row.id, 200, body)
        return {**row, "token_ids": [list(each.token_ids) for each in completions]} if self._has_token_ids else row

    def _with_calls(self, choice: dict[str, Any], prompt: Prompt, form: OpenAIForm) -> dict[str, Any]:
        """Return a choice with the calls of tools that its text holds, whose ids are the same in every run."""
        if (use := form.tools) is None:
            return choice
        tokenizer = self._tokenizer
        written = tool_format_of(use, tokenizer, tokenizer.get_chat_template(tools=list(use.tools)))
        text = tokenizer.decode(prompt.token_ids) if written is not None and written.reads_prompt else ""
        hidden = () if form.keeps_special else tokenizer.all_special_tokens
        ids = ids_of(f"{_hash(prompt.row.id)} {choice['index']}")
        return with_calls(choice, open_parser(use, written, text, hidden, ids))


def error_response(row_id: RowId, message: str, fault: Fault) -> dict[str, Any]:
    """Return the row of a request that got no completion."""
    error = {"message": message, "type": _KINDS[fault.status], "param": fault.param, "code": fault.code}
    return _row(row_id, fault.status, {"error": error})


def expired_row(row_id: RowId) -> dict[str, Any]:
    """Return the row of a request that was not computed in time."""
    message = "This request could not be executed before the completion window expired."
    error = {"code": "batch_expired", "message": message}
    return {"id": f"batch_req_{_hash(row_id)}", "custom_id": row_id, "response": None, "error": error}


def read_response(record: Mapping[str, Any]) -> tuple[str, bool]:
    """Return the `custom_id` of an output row, and whether it is an error row.

    Raises:
        ValueError: zinfer does not write such rows.
    """
    match record:
        case {"custom_id": str(custom_id), "response": {"status_code": 200, "body": {"choices": [_, *_]}}}:
            return custom_id, False
        case {"custom_id": str(custom_id), "response": {"status_code": 400 | 404 | 500, "body": {"error": {}}}}:
            return custom_id, True
    raise ValueError("neither a completion nor an error")


def _row(row_id: RowId, status: int, body: Mapping[str, Any]) -> dict[str, Any]:
    key = _hash(row_id)
    response = {"status_code": status, "request_id": f"req_{key}", "body": body}
    return {"id": f"batch_req_{key}", "custom_id": row_id, "response": response, "error": None}


def _hash(row_id: RowId) -> str:
    return f"{id_key(row_id):016x}"
