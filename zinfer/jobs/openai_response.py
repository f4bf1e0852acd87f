"""Write rows in the OpenAI format: lines of a batch output file."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import accumulate
from typing import Any, Final

from zinfer.jobs.openai_batch import OpenAIForm
from zinfer.jobs.prompts import Prompt
from zinfer.jobs.rows import RowId, id_key
from zinfer.requests.completion import Completion
from zinfer.requests.logprobs import Logprobs

_LEAST_LOGPROB: Final = -9999.0  # OpenAI's value for impossible tokens; JSON has no infinity
_REPLACEMENT: Final = "\ufffd"


class OpenAIResponses:
    """Builds the output rows of one job.

    Args:
        began: start of the job, ``created`` in every row, so that a resumed job writes the same bytes.
        model_name: default for rows that name no model.
        tokenizer: used only by the calling thread.
    """

    def __init__(self, began: datetime, model_name: str, tokenizer: Any) -> None:
        self._created = int(began.timestamp())
        self._model_name = model_name
        self._tokenizer = tokenizer
        self._special = frozenset(() if tokenizer is None else tokenizer.all_special_ids)
        self._texts: dict[int, str] = {}  # of single tokens

    def completed(self, prompt: Prompt, form: OpenAIForm, completions: Sequence[Completion]) -> dict[str, Any]:
        """Return the output row of a prompt with all its completions."""
        num_prompt, num_new = len(prompt.token_ids), sum(len(each.token_ids) for each in completions)
        body = {
            "id": f"{'chatcmpl' if form.is_chat else 'cmpl'}-{_hash(prompt.row.id)}",
            "object": "chat.completion" if form.is_chat else "text_completion",
            "created": self._created,
            "model": self._model_name if form.model is None else form.model,
            "choices": [self._choice(prompt, form, each) for each in completions],
            "usage": {
                "prompt_tokens": num_prompt,
                "completion_tokens": num_new,
                "total_tokens": num_prompt + num_new,
            },
        }
        return _row(prompt.row.id, 200, body)

    def _choice(self, prompt: Prompt, form: OpenAIForm, completion: Completion) -> dict[str, Any]:
        answer: dict[str, Any] = {"text": completion.text}
        if form.is_chat:
            answer = {"message": {"role": "assistant", "content": completion.text, "refusal": None}}
        shown: dict[str, Any] | None = None
        if completion.logprobs is not None:
            pairs = list(zip(completion.token_ids, completion.logprobs, strict=True))
            if form.is_chat:
                shown = {"content": [self._chat_logprobs(*pair) for pair in pairs]}
            else:
                shown = self._text_logprobs(completion.text, pairs, skips_special=prompt.params.skip_special_tokens)
        return {
            "index": completion.sample_index,
            **answer,
            "logprobs": shown,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }

    def _chat_logprobs(self, token_id: int, each: Logprobs) -> dict[str, Any]:
        tops = [self._chat_token(*top) for top in zip(each.top_ids, each.top, strict=True)]
        return {**self._chat_token(token_id, each.chosen), "top_logprobs": tops}

    def _chat_token(self, token_id: int, logprob: float) -> dict[str, Any]:
        """Return a token with its logprob; `bytes` is null for a token that holds part of a character."""
        text = self._text(token_id)
        raw = None if _REPLACEMENT in text else list(text.encode())
        return {"token": text, "logprob": max(logprob, _LEAST_LOGPROB), "bytes": raw}

    def _text_logprobs(
        self, text: str, pairs: Sequence[tuple[int, Logprobs]], *, skips_special: bool
    ) -> dict[str, Any]:
        """Return the logprobs of a choice in the format of `/v1/completions`.

        Offsets index the choice's text and are at most its length; skipped special tokens have no length. They sum the
        lengths of single tokens, so a character made of several tokens counts once for each.
        """
        lengths = [
            0
            if skips_special and token_id in self._special
            else len(self._text(token_id) if place else self._decode([token_id]))
            for place, (token_id, _) in enumerate(pairs)
        ]
        offsets = list(accumulate(lengths, initial=0))[:-1]
        return {
            "tokens": [self._text(token_id) for token_id, _ in pairs],
            "token_logprobs": [max(each.chosen, _LEAST_LOGPROB) for _, each in pairs],
            "top_logprobs": [self._by_text(*pair) for pair in pairs],
            "text_offset": [min(offset, len(text)) for offset in offsets],
        }

    def _by_text(self, token_id: int, each: Logprobs) -> dict[str, float]:
        """Map the text of the top tokens and the chosen one to logprobs; the highest wins for equal texts."""
        found: dict[str, float] = {}
        for other_id, logprob in (*zip(each.top_ids, each.top, strict=True), (token_id, each.chosen)):
            found.setdefault(self._text(other_id), max(logprob, _LEAST_LOGPROB))
        return found

    def _text(self, token_id: int) -> str:
        """Decode a token as it reads after another token: some tokenizers drop the first token's leading space."""
        if token_id not in self._texts:
            alone, twice = self._decode([token_id]), self._decode([token_id, token_id])
            self._texts[token_id] = twice[len(alone) :] if twice.startswith(alone) else alone
        return self._texts[token_id]

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text


def error_response(row_id: RowId, status: int, message: str) -> dict[str, Any]:
    """Return the row of an invalid request (status 400), or of one on which the model failed (500)."""
    kind = "invalid_request_error" if status == 400 else "server_error"
    return _row(row_id, status, {"error": {"message": message, "type": kind, "param": None, "code": None}})


def read_response(record: Mapping[str, Any]) -> tuple[str, bool]:
    """Return the `custom_id` of an output row, and whether it is an error row.

    Raises:
        ValueError: zinfer does not write such rows.
    """
    match record:
        case {"custom_id": str(custom_id), "response": {"status_code": 200, "body": {"choices": [_, *_]}}}:
            return custom_id, False
        case {"custom_id": str(custom_id), "response": {"status_code": 400 | 500, "body": {"error": {}}}}:
            return custom_id, True
    raise ValueError("neither a completion nor an error")


def _row(row_id: RowId, status: int, body: Mapping[str, Any]) -> dict[str, Any]:
    key = _hash(row_id)
    response = {"status_code": status, "request_id": f"req_{key}", "body": body}
    return {"id": f"batch_req_{key}", "custom_id": row_id, "response": response, "error": None}


def _hash(row_id: RowId) -> str:
    return f"{id_key(row_id):016x}"
