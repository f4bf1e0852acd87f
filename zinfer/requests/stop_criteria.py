"""When a text is complete: at an end token, at a stop string, or when it has all its tokens."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, Self

from zinfer.requests.sampling_params import SamplingParams

# A stop string of n bytes spans at most n tokens, bar tokens without text: special ones are not counted, and a few
# others are allowed for.
_SPARE_TOKENS: Final = 8


def find_end_token_ids(generation_config: Any, tokenizer: Any) -> list[int]:
    """The tokens that end a text: the generation config's, else the tokenizer's; either may be None."""
    ends = None if generation_config is None else generation_config.eos_token_id
    if ends is None and tokenizer is not None:
        ends = tokenizer.eos_token_id
    if ends is None:
        return []
    return [ends] if isinstance(ends, int) else list(ends)


def special_stops(tokenizer: Any, stop: Sequence[str]) -> dict[int, str]:
    """The stop strings that are one special token each, by token: they have no text to be found in."""
    if tokenizer is None or not stop:
        return {}
    special = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    return {special[text]: text for text in stop if text in special}


class StopCriteria:
    """One text's own conditions.

    Args:
        tokenizer: decodes; None where there is none, then a text has no characters.
        end_token_ids: tokens that end it, themselves without text, and what `stop_reason` says of each.
        stop: strings before which it is cut.
        max_new_tokens: most tokens that it gets.
        min_new_tokens: stop strings that are complete within so many do not count, as in vLLM.
        keeps_stop: whether its text has the token or stop string that ended it.
        skips_special: whether its text is without special tokens.

    Attributes:
        last_ids: the tokens that end it.
        reads: whether it looks for stop strings; without any, no other token ends it but the last that it may have.
    """

    def __init__(
        self,
        tokenizer: Any,
        end_token_ids: Mapping[int, int | str | None],
        stop: Sequence[str],
        max_new_tokens: int,
        min_new_tokens: int = 0,
        *,
        keeps_stop: bool = False,
        skips_special: bool = True,
    ) -> None:
        assert tokenizer is not None or not stop, "stop strings need a tokenizer"
        self._tokenizer = tokenizer
        self.last_ids = frozenset(end_token_ids)
        self._reasons = end_token_ids
        self._stop = tuple(stop)
        self.reads = bool(stop)
        self._special_ids = frozenset(tokenizer.all_special_ids) if stop else frozenset()
        self._window = max((len(text.encode()) for text in stop), default=0) + _SPARE_TOKENS
        self._max_new_tokens = max_new_tokens
        self._min_new_tokens = min_new_tokens
        self._keeps_stop = keeps_stop
        self._skips_special = skips_special

    @classmethod
    def of(cls, tokenizer: Any, params: SamplingParams, end_token_ids: Collection[int]) -> Self:
        """By a row's params; ``end_token_ids`` are the model's, where they end the row."""
        stops = {token_id: token_id for token_id in params.stop_token_ids} | special_stops(tokenizer, params.stop)
        ends = {**stops, **dict.fromkeys(end_token_ids)}
        return cls(
            tokenizer,
            ends,
            params.stop,
            params.most_new_tokens,
            params.min_new_tokens,
            keeps_stop=params.include_stop_str_in_output,
            skips_special=params.skip_special_tokens,
        )

    def reason(self, token_ids: Sequence[int]) -> str | None:
        """Why the text ends with the last of these tokens: "stop" or "length"; None: it goes on."""
        if token_ids[-1] in self.last_ids or (self._stop and self._has_stop(token_ids)):
            return "stop"
        return "length" if len(token_ids) >= self._max_new_tokens else None

    def stop_reason(self, token_ids: Sequence[int]) -> int | str | None:
        """The stop string or token that the text ends with; None where that is the model's own, or there is none."""
        if token_ids[-1] in self.last_ids:
            return self._reasons[token_ids[-1]]
        first = self._first_stop(self._decode(token_ids), token_ids)
        return None if first is None else first[1]

    def text(self, token_ids: Sequence[int]) -> str:
        """The text: cut before the token or stop string that ended it, or behind it."""
        ends = bool(token_ids) and token_ids[-1] in self.last_ids
        text = self._decode(token_ids[:-1] if ends else token_ids)
        if (first := self._first_stop(text, token_ids)) is not None:
            begin, stop = first
            return text[: begin + len(stop) if self._keeps_stop else begin]
        if not ends or not self._keeps_stop:
            return text
        special = self._reasons[token_ids[-1]]
        return text + special if isinstance(special, str) else self._decode(token_ids)

    def _has_stop(self, token_ids: Sequence[int]) -> bool:
        if len(token_ids) <= self._min_new_tokens:
            return False
        tail = self._decode(token_ids[self._tail_begin(token_ids) :])
        if not any(stop in tail for stop in self._stop):
            return False
        return self._first_stop(self._decode(token_ids), token_ids) is not None

    def _tail_begin(self, token_ids: Sequence[int]) -> int:
        """Where the last tokens begin that a stop string which ends with the last one may span."""
        begin, num_left = len(token_ids), self._window
        while begin and num_left:
            begin -= 1
            num_left -= token_ids[begin] not in self._special_ids
        return begin

    def _first_stop(self, text: str, token_ids: Sequence[int]) -> tuple[int, str] | None:
        """Where the first stop string begins that counts, and which it is; None where there is none."""
        held_back = len(self._decode(token_ids[: self._min_new_tokens])) if self._stop and self._min_new_tokens else 0
        found = ((text.find(stop, max(0, held_back - len(stop) + 1)), stop) for stop in self._stop)
        return min((each for each in found if each[0] >= 0), default=None, key=lambda each: each[0])

    def _decode(self, token_ids: Sequence[int]) -> str:
        if self._tokenizer is None:
            return ""
        text: str = self._tokenizer.decode(
            token_ids, skip_special_tokens=self._skips_special, clean_up_tokenization_spaces=False
        )
        return text
