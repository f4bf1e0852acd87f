"""Choices of OpenAI's chat completions and text completions, whole and as chunks of a stream."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Final

from zinfer.requests.completion import Completion, CompletionDelta
from zinfer.requests.logprobs import Logprobs

_LEAST_LOGPROB: Final = -9999.0  # OpenAI's value for impossible tokens; JSON has no infinity
_REPLACEMENT: Final = "\ufffd"


class OpenAIChoices:
    """Builds choices of one model's completions.

    Args:
        tokenizer: used only by the calling thread.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(() if tokenizer is None else tokenizer.all_special_ids)
        self._texts: dict[int, str] = {}  # of single tokens

    def whole(self, completion: Completion, *, is_chat: bool, skips_special: bool, begin: int = 0) -> dict[str, Any]:
        """Return a completion as a choice.

        Args:
            skips_special: whether the text lacks special tokens.
            begin: position of the completion in the choice's text, after an echoed prompt.
        """
        answer: dict[str, Any] = {"text": completion.text}
        if is_chat:
            answer = {"message": {"role": "assistant", "content": completion.text, "refusal": None}}
        shown = self._logprobs(
            completion.token_ids, completion.logprobs, begin, begin + len(completion.text), is_chat, skips_special
        )
        reasons = {"finish_reason": completion.finish_reason, "stop_reason": completion.stop_reason}
        return {"index": completion.sample_index, **answer, "logprobs": shown, **reasons}

    def chunk(self, delta: CompletionDelta, *, is_chat: bool, skips_special: bool, begin: int = 0) -> dict[str, Any]:
        """Return an increment of a completion as the choice of a stream's chunk.

        Args:
            begin: characters of the choice before this increment.
        """
        answer: dict[str, Any] = {"delta": {"content": delta.text}} if is_chat else {"text": delta.text}
        shown = self._logprobs(delta.token_ids, delta.logprobs, begin, begin + len(delta.text), is_chat, skips_special)
        whole = delta.completion
        reasons = {
            "finish_reason": None if whole is None else whole.finish_reason,
            "stop_reason": None if whole is None else whole.stop_reason,
        }
        return {"index": delta.sample_index, **answer, "logprobs": shown, **reasons}

    def _logprobs(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[Logprobs] | None,
        begin: int,
        end: int,
        is_chat: bool,
        skips_special: bool,
    ) -> dict[str, Any] | None:
        if logprobs is None:
            return None
        pairs = list(zip(token_ids, logprobs, strict=True))
        if is_chat:
            return {"content": [self._chat_logprobs(*pair) for pair in pairs]}
        return self._text_logprobs(begin, end, pairs, skips_special=skips_special)

    def _chat_logprobs(self, token_id: int, each: Logprobs) -> dict[str, Any]:
        tops = [self._chat_token(*top) for top in zip(each.top_ids, each.top, strict=True)]
        return {**self._chat_token(token_id, each.chosen), "top_logprobs": tops}

    def _chat_token(self, token_id: int, logprob: float) -> dict[str, Any]:
        """Return a token with its logprob; `bytes` is null for a token that holds part of a character."""
        text = self._text(token_id)
        raw = None if _REPLACEMENT in text else list(text.encode())
        return {"token": text, "logprob": max(logprob, _LEAST_LOGPROB), "bytes": raw}

    def _text_logprobs(
        self, begin: int, end: int, pairs: Sequence[tuple[int, Logprobs]], *, skips_special: bool
    ) -> dict[str, Any]:
        """Return the logprobs of a choice in the format of `/v1/completions`.

        Offsets index the choice's text and are at most its length; skipped special tokens have no length. They sum the
        lengths of single tokens, so a character made of several tokens counts once for each.
        """
        lengths = [
            0
            if skips_special and token_id in self._special
            else len(self._text(token_id) if place or begin else self._decode([token_id]))
            for place, (token_id, _) in enumerate(pairs)
        ]
        offsets = list(accumulate(lengths, initial=begin))[:-1]
        return {
            "tokens": [self._text(token_id) for token_id, _ in pairs],
            "token_logprobs": [max(each.chosen, _LEAST_LOGPROB) for _, each in pairs],
            "top_logprobs": [self._by_text(*pair) for pair in pairs],
            "text_offset": [min(offset, end) for offset in offsets],
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


def usage(num_prompt: int, num_new: int) -> dict[str, int]:
    """Return the counts of tokens as OpenAI's responses hold them."""
    return {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new}
