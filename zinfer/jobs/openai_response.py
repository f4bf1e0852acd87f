"""The OpenAI form of an output row: a line of the file that a batch of theirs ends with."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import accumulate
from typing import Any, Final

from zinfer.jobs.openai_batch import OpenAIForm
from zinfer.jobs.prompts import Prompt
from zinfer.jobs.rows import RowId, id_key
from zinfer.requests.completion import Completion
from zinfer.requests.logprobs import Logprobs

_LEAST_LOGPROB: Final = -9999.0  # what OpenAI writes for tokens that cannot come; JSON has no infinity
_REPLACEMENT: Final = "\ufffd"


class OpenAIResponses:
    """Makes the rows of one job.

    Args:
        began: when the job did, which is ``created`` in every row, so that a resumed job writes the same bytes.
        model_name: of rows that name no model.
        tokenizer: used by the calling thread alone.
    """

    def __init__(self, began: datetime, model_name: str, tokenizer: Any) -> None:
        self._created = int(began.timestamp())
        self._model_name = model_name
        self._tokenizer = tokenizer
        self._special = frozenset(() if tokenizer is None else tokenizer.all_special_ids)
        self._texts: dict[int, str] = {}  # of single tokens

    def completed(self, prompt: Prompt, form: OpenAIForm, completions: Sequence[Completion]) -> dict[str, Any]:
        """The row of a prompt whose completions are all there."""
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
        """`bytes` is null for a token that holds a part of a character."""
        text = self._text(token_id)
        raw = None if _REPLACEMENT in text else list(text.encode())
        return {"token": text, "logprob": max(logprob, _LEAST_LOGPROB), "bytes": raw}

    def _text_logprobs(
        self, text: str, pairs: Sequence[tuple[int, Logprobs]], *, skips_special: bool
    ) -> dict[str, Any]:
        """Offsets are in the choice's own text, where special tokens that are skipped take no place, and end with it.

        They are sums of the lengths of single tokens: a character made of several tokens counts once for each.
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
        """The most likely tokens and the chosen one; of several with the same text the likeliest counts."""
        found: dict[str, float] = {}
        for other_id, logprob in (*zip(each.top_ids, each.top, strict=True), (token_id, each.chosen)):
            found.setdefault(self._text(other_id), max(logprob, _LEAST_LOGPROB))
        return found

    def _text(self, token_id: int) -> str:
        """A token's text after another token, since some tokenizers drop the leading space of the first."""
        if token_id not in self._texts:
            alone, twice = self._decode([token_id]), self._decode([token_id, token_id])
            self._texts[token_id] = twice[len(alone) :] if twice.startswith(alone) else alone
        return self._texts[token_id]

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text


def error_response(row_id: RowId, status: int, message: str) -> dict[str, Any]:
    """The row of a request that cannot be used (status 400), or that the model is to blame for (500)."""
    kind = "invalid_request_error" if status == 400 else "server_error"
    return _row(row_id, status, {"error": {"message": message, "type": kind, "param": None, "code": None}})


def read_response(record: Mapping[str, Any]) -> tuple[str, bool]:
    """A written row's `custom_id`, and whether the row says what went wrong.

    Raises:
        ValueError: no job writes such a row.
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
