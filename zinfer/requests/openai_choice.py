"""Choices of OpenAI's chat completions and text completions, whole and as chunks of a stream."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from zinfer.requests.completion import Completion, CompletionDelta
from zinfer.requests.logprobs import Logprobs

_LEAST_LOGPROB: Final = -9999.0  # OpenAI's value for impossible tokens; JSON has no infinity
_REPLACEMENT: Final = "\ufffd"


@dataclass(frozen=True)
class Echo:
    """A prompt that choices begin with: its text and its tokens."""

    text: str
    token_ids: Sequence[int]


class OpenAIChoices:
    """Builds choices of one model's completions.

    Args:
        tokenizer: used only by the calling thread.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(() if tokenizer is None else tokenizer.all_special_ids)
        self._texts: dict[int, str] = {}  # of single tokens

    def whole(
        self, completion: Completion, *, is_chat: bool, skips_special: bool, echo: Echo | None = None
    ) -> dict[str, Any]:
        """Return a completion as a choice; scores of a prompt that is not echoed are in it as in vLLM's.

        Args:
            skips_special: whether the text lacks special tokens.
            echo: what the choice begins with.
        """
        scores, begin = completion.prompt_logprobs, 0 if echo is None else len(echo.text)
        answer: dict[str, Any] = {"text": completion.text if echo is None else echo.text + completion.text}
        if is_chat:
            answer = {"message": {"role": "assistant", "content": completion.text, "refusal": None}}
        shown = self._logprobs(
            completion.token_ids, completion.logprobs, begin, completion.text, is_chat, skips_special
        )
        if echo is not None and scores is not None and shown is not None:
            own = self._echoed(echo, scores)
            shown = {name: own[name] + values for name, values in shown.items()}
        return {"index": completion.sample_index, **answer, "logprobs": shown, **_end(completion)}

    def echo(self, echo: Echo, scores: Sequence[Logprobs | None] | None) -> dict[str, Any]:
        """Return a prompt as the first of a stream's chunks for a choice, without its index."""
        shown = None if scores is None else self._echoed(echo, scores)
        return {"text": echo.text, "logprobs": shown, "finish_reason": None}

    def scores(self, token_ids: Sequence[int], scores: Sequence[Logprobs | None]) -> list[dict[str, Any] | None]:
        """Return the scores of a prompt as vLLM's `prompt_logprobs`: for each token an object by token ids."""
        pairs = zip(token_ids, scores, strict=True)
        return [None if each is None else self._by_id(token_id, each) for token_id, each in pairs]

    def chunk(self, delta: CompletionDelta, *, is_chat: bool, skips_special: bool, begin: int = 0) -> dict[str, Any]:
        """Return an increment of a completion as the choice of a stream's chunk.

        Args:
            begin: characters of the choice before this increment.
        """
        answer: dict[str, Any] = {"delta": {"content": delta.text}} if is_chat else {"text": delta.text}
        shown = self._logprobs(delta.token_ids, delta.logprobs, begin, delta.text, is_chat, skips_special)
        return {"index": delta.sample_index, **answer, "logprobs": shown, **_end(delta.completion)}

    def _logprobs(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[Logprobs] | None,
        begin: int,
        text: str,
        is_chat: bool,
        skips_special: bool,
    ) -> dict[str, Any] | None:
        if logprobs is None:
            return None
        pairs = list(zip(token_ids, logprobs, strict=True))
        if is_chat:
            return {"content": [self._chat_logprobs(*pair) for pair in pairs]}
        return self._text_logprobs(begin, text, pairs, skips_special=skips_special)

    def _chat_logprobs(self, token_id: int, each: Logprobs) -> dict[str, Any]:
        tops = [self._chat_token(*top) for top in zip(each.top_ids, each.top, strict=True)]
        return {**self._chat_token(token_id, each.chosen), "top_logprobs": tops}

    def _chat_token(self, token_id: int, logprob: float) -> dict[str, Any]:
        """Return a token with its logprob; `bytes` is null for a token that holds part of a character."""
        text = self._text(token_id)
        raw = None if _REPLACEMENT in text else list(text.encode())
        return {"token": text, "logprob": max(logprob, _LEAST_LOGPROB), "bytes": raw}

    def _text_logprobs(
        self, begin: int, text: str, pairs: Sequence[tuple[int, Logprobs]], *, skips_special: bool
    ) -> dict[str, Any]:
        """Return the logprobs of a choice in the format of `/v1/completions`.

        Offsets index the choice's text; skipped special tokens have no length.
        """
        offsets = self._offsets(
            [token_id for token_id, _ in pairs], text, lambda token_id, _: skips_special and token_id in self._special
        )
        return {
            "tokens": [self._text(token_id) for token_id, _ in pairs],
            "token_logprobs": [max(each.chosen, _LEAST_LOGPROB) for _, each in pairs],
            "top_logprobs": [self._by_text(*pair) for pair in pairs],
            "text_offset": [begin + offset for offset in offsets],
        }

    def _echoed(self, echo: Echo, scores: Sequence[Logprobs | None]) -> dict[str, Any]:
        """Return the logprobs of a prompt; a token that is not in the text, such as the first special one, is empty."""
        offsets = self._offsets(
            echo.token_ids,
            echo.text,
            lambda token_id, end: token_id in self._special and not echo.text.startswith(self._text(token_id), end),
        )
        pairs = list(zip(echo.token_ids, scores, strict=True))
        return {
            "tokens": [self._text(token_id) for token_id in echo.token_ids],
            "token_logprobs": [None if each is None else max(each.chosen, _LEAST_LOGPROB) for each in scores],
            "top_logprobs": [None if each is None else self._by_text(token_id, each) for token_id, each in pairs],
            "text_offset": offsets,
        }

    def _offsets(self, token_ids: Sequence[int], text: str, is_hidden: Callable[[int, int], bool]) -> list[int]:
        """Return where each token begins in their text, at most its length; all tokens of a character where that does.

        Args:
            is_hidden: whether a token, at this offset, is not in the text.
        """
        offsets, end = [], 0
        parts: list[int] = []  # of a character
        for token_id in token_ids:
            if _REPLACEMENT in self._text(token_id):
                offsets.append(end)
                parts.append(token_id)
                if not (decoded := self._decode(parts)).endswith(_REPLACEMENT):
                    end, parts = end + len(decoded), []
                continue
            if parts:
                end, parts = end + len(self._decode(parts)), []
            offsets.append(end)
            if not is_hidden(token_id, end):
                end += self._length(token_id, None if end else text)
        return [min(offset, len(text)) for offset in offsets]

    def _by_id(self, token_id: int, each: Logprobs) -> dict[str, Any]:
        found = {
            str(other_id): {
                "logprob": max(logprob, _LEAST_LOGPROB),
                "rank": rank,
                "decoded_token": self._text(other_id),
            }
            for rank, (other_id, logprob) in enumerate(zip(each.top_ids, each.top, strict=True), start=1)
        }
        own = {"logprob": max(each.chosen, _LEAST_LOGPROB), "rank": None, "decoded_token": self._text(token_id)}
        return {str(token_id): found.get(str(token_id), own)} | found

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

    def _length(self, token_id: int, begun: str | None) -> int:
        """Return the characters of a token, which may have lost its leading space if it begins a text."""
        text = self._text(token_id)
        if begun is not None and not begun.startswith(text) and begun.startswith(alone := self._decode([token_id])):
            return len(alone)
        return len(text)

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text


def _end(completion: Completion | None) -> dict[str, Any]:
    """Return a choice's reasons, and the seed if its tokens were drawn; giving that as `seed` repeats the choice."""
    if completion is None:
        return {"finish_reason": None, "stop_reason": None}
    seed = {} if completion.seed is None else {"seed": completion.seed}
    return {"finish_reason": completion.finish_reason, "stop_reason": completion.stop_reason, **seed}


def usage(num_prompt: int, num_new: int) -> dict[str, int]:
    """Return the counts of tokens as OpenAI's responses hold them."""
    return {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new}
