"""Choices of OpenAI's chat completions and text completions, whole and as chunks of a stream."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from zinfer.requests.completion import Completion, CompletionDelta
from zinfer.requests.logprobs import Logprobs
from zinfer.requests.prompt_end import decode, token_bytes

_LEAST_LOGPROB: Final = -9999.0  # OpenAI's value for impossible tokens; JSON has no infinity
_REPLACEMENT: Final = "\ufffd"


@dataclass(frozen=True)
class Echo:
    """A prompt that choices begin with: its text and its tokens."""

    text: str
    token_ids: Sequence[int]


class OpenAIChoices:
    """Builds choices of one model's completions; thread-safe.

    Args:
        tokenizer: only its decoder is used.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(() if tokenizer is None else tokenizer.all_special_ids)
        self._texts: dict[int, str] = {}  # of single tokens
        self._lock = threading.Lock()  # not all tokenizers are thread-safe

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
        shown = None
        if completion.logprobs is not None:
            pairs = list(zip(completion.token_ids, completion.logprobs, strict=True))
            if is_chat:
                shown = self._chat_content(pairs)
            else:
                text = TextLogprobs(self, begin=begin, skips_special=skips_special)
                shown = text.add(pairs, completion.text, is_last=True)
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

    def chunk(self, delta: CompletionDelta, logprobs: "TextLogprobs | None") -> dict[str, Any]:
        """Return an increment of a completion as the choice of a stream's chunk.

        Args:
            logprobs: of this text completion; None: it is a chat's.
        """
        is_last = delta.completion is not None
        pairs = None if delta.logprobs is None else list(zip(delta.token_ids, delta.logprobs, strict=True))
        if logprobs is None:
            answer: dict[str, Any] = {"delta": {"content": delta.text}}
            shown = None if pairs is None else self._chat_content(pairs)
        else:
            answer = {"text": delta.text}
            shown = None if pairs is None else logprobs.add(pairs, delta.text, is_last=is_last)
        return {"index": delta.sample_index, **answer, "logprobs": shown, **_end(delta.completion)}

    def _chat_content(self, pairs: Sequence[tuple[int, Logprobs]]) -> dict[str, Any]:
        return {"content": [self._chat_logprobs(*pair) for pair in pairs]}

    def _chat_logprobs(self, token_id: int, each: Logprobs) -> dict[str, Any]:
        tops = [self._chat_token(*top) for top in zip(each.top_ids, each.top, strict=True)]
        return {**self._chat_token(token_id, each.chosen), "top_logprobs": tops}

    def _chat_token(self, token_id: int, logprob: float) -> dict[str, Any]:
        """Return a token with its logprob and its bytes, which may be part of a character."""
        text = self._text(token_id)
        raw = text.encode()
        if _REPLACEMENT in text and (own := token_bytes(self._tokenizer, token_id)) is not None:
            raw = own
        return {"token": text, "logprob": max(logprob, _LEAST_LOGPROB), "bytes": list(raw)}

    def _text_logprobs(self, pairs: Sequence[tuple[int, Logprobs]], offsets: Sequence[int]) -> dict[str, Any]:
        """Return the logprobs of tokens in the format of `/v1/completions`."""
        return {
            "tokens": [self._text(token_id) for token_id, _ in pairs],
            "token_logprobs": [max(each.chosen, _LEAST_LOGPROB) for _, each in pairs],
            "top_logprobs": [self._by_text(*pair) for pair in pairs],
            "text_offset": list(offsets),
        }

    def _echoed(self, echo: Echo, scores: Sequence[Logprobs | None]) -> dict[str, Any]:
        """Return the logprobs of a prompt; a token that is not in the text, such as the first special one, is empty."""
        offsets = _Offsets(
            self,
            lambda token_id, end: token_id in self._special and not echo.text.startswith(self._text(token_id), end),
        ).add(echo.token_ids, echo.text, is_last=True)
        pairs = list(zip(echo.token_ids, scores, strict=True))
        return {
            "tokens": [self._text(token_id) for token_id in echo.token_ids],
            "token_logprobs": [None if each is None else max(each.chosen, _LEAST_LOGPROB) for each in scores],
            "top_logprobs": [None if each is None else self._by_text(token_id, each) for token_id, each in pairs],
            "text_offset": offsets,
        }

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
        with self._lock:
            return decode(self._tokenizer, token_ids, skips_special=False)


class _Offsets:
    """Finds where each token begins in a text, at most at its end; all tokens of a character where that does.

    Args:
        is_hidden: whether a token, at this offset, is not in the text.
    """

    def __init__(self, choices: OpenAIChoices, is_hidden: Callable[[int, int], bool]) -> None:
        self._choices, self._is_hidden = choices, is_hidden
        self._end = 0
        self._parts: list[int] = []  # of a character
        self._before: int | None = None  # a token whose length is not known yet: the text may begin with less of it

    def add(self, token_ids: Sequence[int], text: str, *, is_last: bool) -> list[int]:
        """Return the offsets of the first of the next tokens: of all whose beginnings the text shows.

        Args:
            token_ids: those that are not placed yet.
            text: the whole text so far.
            is_last: whether the text is complete.
        """
        offsets: list[int] = []
        for token_id in token_ids:
            if not self._pass_before(text, is_last=is_last):
                break
            is_part = _REPLACEMENT in self._choices._text(token_id)
            if self._parts and not is_part:
                self._end, self._parts = self._end + len(self._choices._decode(self._parts)), []
            if self._end > len(text) and not is_last:
                break
            offsets.append(min(self._end, len(text)))
            if not is_part:
                self._before = None if self._is_hidden(token_id, self._end) else token_id
                continue
            self._parts.append(token_id)
            if not (decoded := self._choices._decode(self._parts)).endswith(_REPLACEMENT):
                self._end, self._parts = self._end + len(decoded), []
        return offsets

    def _pass_before(self, text: str, *, is_last: bool) -> bool:
        """Add the length of the token before; returns whether the text shows it."""
        if (before := self._before) is None:
            return True
        if not self._end and not is_last and len(text) < len(self._choices._text(before)):
            return False
        self._end += self._choices._length(before, None if self._end else text)
        self._before = None
        return True


class TextLogprobs:
    """Builds the logprobs of a text completion as it grows; in all chunks together they are those of the whole one.

    A token comes once the text before it is known: what is held back may be cut off.

    Args:
        begin: characters of the choice before the completion.
        skips_special: whether the text lacks special tokens.
    """

    def __init__(self, choices: OpenAIChoices, *, begin: int, skips_special: bool) -> None:
        self._choices, self._begin = choices, begin
        special = choices._special if skips_special else frozenset[int]()
        self._offsets = _Offsets(choices, lambda token_id, _: token_id in special)
        self._text = ""
        self._waiting: list[tuple[int, Logprobs]] = []

    def add(self, pairs: Sequence[tuple[int, Logprobs]], text: str, *, is_last: bool) -> dict[str, Any] | None:
        """Return the logprobs of the tokens that are placed now; None: of no token.

        Args:
            pairs: the next tokens.
            text: what is added to the text.
            is_last: whether the text is complete; the answer is not None then.
        """
        self._text += text
        self._waiting += pairs
        offsets = self._offsets.add([token_id for token_id, _ in self._waiting], self._text, is_last=is_last)
        placed, self._waiting = self._waiting[: len(offsets)], self._waiting[len(offsets) :]
        if not placed and not is_last:
            return None
        return self._choices._text_logprobs(placed, [self._begin + offset for offset in offsets])


def _end(completion: Completion | None) -> dict[str, Any]:
    """Return a choice's reasons, and the seed if its tokens were drawn; giving that as `seed` repeats the choice."""
    if completion is None:
        return {"finish_reason": None, "stop_reason": None}
    seed = {} if completion.seed is None else {"seed": completion.seed}
    return {"finish_reason": completion.finish_reason, "stop_reason": completion.stop_reason, **seed}


def usage(num_prompt: int, num_new: int) -> dict[str, int]:
    """Return the counts of tokens as OpenAI's responses hold them."""
    return {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new}
