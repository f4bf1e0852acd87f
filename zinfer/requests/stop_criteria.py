"""When a text is complete: at an end token, at a stop string, or when it has all its tokens."""

from collections.abc import Collection, Sequence
from typing import Any, Final

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


class StopCriteria:
    """One text's own conditions.

    A stop string that is one special token ends the text like an end token: it has no text to be found in.

    Args:
        tokenizer: decodes; None where there is none, then a text has no characters.
        params: of the row. Stop strings that are complete within `min_new_tokens` do not count, as in vLLM.
        end_token_ids: the model's, where they end the row.

    Attributes:
        last_ids: the tokens that end it.
        reads: whether it looks for stop strings; without any, no other token ends it but the last that it may have.
    """

    def __init__(self, tokenizer: Any, params: SamplingParams, end_token_ids: Collection[int]) -> None:
        self._tokenizer, self._params, self._stop = tokenizer, params, params.stop
        self.reads, self._most_tokens = bool(params.stop), params.most_new_tokens
        special: dict[str, int] = {}
        if self.reads:
            special = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
        self._special_ids = frozenset(special.values())
        # What `stop_reason` says of each token.
        self._reasons: dict[int, int | str | None] = {token_id: token_id for token_id in params.stop_token_ids}
        self._reasons |= {special[text]: text for text in params.stop if text in special}
        self._reasons |= dict.fromkeys(end_token_ids)
        self.last_ids = frozenset(self._reasons)
        self._window = max((len(text.encode()) for text in params.stop), default=0) + _SPARE_TOKENS

    def reason(self, token_ids: Sequence[int]) -> str | None:
        """Why the text ends with the last of these tokens: "stop" or "length"; None: it continues."""
        if token_ids[-1] in self.last_ids or (self._stop and self._has_stop(token_ids)):
            return "stop"
        return "length" if len(token_ids) >= self._most_tokens else None

    def stop_reason(self, token_ids: Sequence[int]) -> int | str | None:
        """The stop string or token that the text ends with; None where that is the model's own, or there is none."""
        if token_ids[-1] in self.last_ids:
            return self._reasons[token_ids[-1]]
        first = self._first_stop(self._decode(token_ids), token_ids)
        return None if first is None else first[1]

    def text(self, token_ids: Sequence[int]) -> str:
        """The text: cut before the token or stop string that ended it, or after it."""
        ends = bool(token_ids) and token_ids[-1] in self.last_ids
        text = self._decode(token_ids[:-1] if ends else token_ids)
        if (first := self._first_stop(text, token_ids)) is not None:
            begin, stop = first
            return text[: begin + len(stop) if self._params.include_stop_str_in_output else begin]
        if not ends or not self._params.include_stop_str_in_output:
            return text
        special = self._reasons[token_ids[-1]]
        return text + special if isinstance(special, str) else self._decode(token_ids)

    def _has_stop(self, token_ids: Sequence[int]) -> bool:
        if len(token_ids) <= self._params.min_new_tokens:
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
        least = self._params.min_new_tokens
        held_back = len(self._decode(token_ids[:least])) if self._stop and least else 0
        found = ((text.find(stop, max(0, held_back - len(stop) + 1)), stop) for stop in self._stop)
        return min((each for each in found if each[0] >= 0), default=None, key=lambda each: each[0])

    def _decode(self, token_ids: Sequence[int]) -> str:
        if self._tokenizer is None:
            return ""
        text: str = self._tokenizer.decode(
            token_ids, skip_special_tokens=self._params.skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text
