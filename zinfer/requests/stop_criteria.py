"""Stop criteria of a sequence: end tokens, stop strings and the maximum length."""

from collections.abc import Collection, Sequence
from typing import Any, Final

from zinfer.requests.prompt_end import NO_PROMPT, PromptEnd, added_text, decode
from zinfer.requests.sampling_params import SamplingParams

# A stop string of n bytes spans at most n tokens with text. Special tokens are not counted; a few others without text
# are allowed for.
_SPARE_TOKENS: Final = 8


def find_end_token_ids(generation_config: Any, tokenizer: Any) -> list[int]:
    """Return the end tokens of the generation config, else of the tokenizer; either may be None."""
    ends = None if generation_config is None else generation_config.eos_token_id
    if ends is None and tokenizer is not None:
        ends = tokenizer.eos_token_id
    if ends is None:
        return []
    return [ends] if isinstance(ends, int) else list(ends)


class StopCriteria:
    """Stop criteria of one sequence.

    A stop string that is a special token works like an end token, since skipped special tokens have no text.

    Args:
        tokenizer: None: sequences have no text.
        params: sampling parameters. Stop strings complete within `min_new_tokens` do not count, as in vLLM.
        end_token_ids: end tokens of the model; empty if they are ignored.
        prompt_end: what the sequence goes on behind.

    Attributes:
        last_ids: the tokens that end the sequence.
        reads: whether there are stop strings; without them only `last_ids` and the length end the sequence.
    """

    def __init__(
        self,
        tokenizer: Any,
        params: SamplingParams,
        end_token_ids: Collection[int],
        prompt_end: PromptEnd = NO_PROMPT,
    ) -> None:
        self._tokenizer = tokenizer if params.detokenize else None
        self._params, self._stop, self._prompt_end = params, params.stop, prompt_end
        self.reads, self._most_tokens = bool(params.stop), params.most_new_tokens
        special: dict[str, int] = {}
        if self.reads:
            special = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
        self._special_ids = frozenset(special.values())
        # Return values of `stop_reason` by token.
        self._reasons: dict[int, int | str | None] = {token_id: token_id for token_id in params.stop_token_ids}
        self._reasons |= {special[text]: text for text in params.stop if text in special}
        self._reasons |= dict.fromkeys(end_token_ids)
        self.last_ids = frozenset(self._reasons)
        self._window = max((len(text.encode()) for text in params.stop), default=0) + _SPARE_TOKENS

    def reason(self, token_ids: Sequence[int]) -> str | None:
        """Return the finish reason, "stop" or "length", if the sequence ends with its last token, else None."""
        if token_ids[-1] in self.last_ids or (self._stop and self._has_stop(token_ids)):
            return "stop"
        return "length" if len(token_ids) >= self._most_tokens else None

    def stop_reason(self, token_ids: Sequence[int]) -> int | str | None:
        """Return the stop string or token that ended the sequence; None for an end token of the model, or no stop."""
        if token_ids[-1] in self.last_ids:
            return self._reasons[token_ids[-1]]
        first = self._first_stop(self._decode(token_ids), token_ids)
        return None if first is None else first[1]

    def text(self, token_ids: Sequence[int]) -> str:
        """Return what tokens add to the prompt's text, cut at the token or stop string that ended it.

        It is cut before it, or after it if the params include stop strings.
        """
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
        begin = self._tail_begin(token_ids)
        tail = self._decode(token_ids[begin:], NO_PROMPT if begin else None)
        if not any(stop in tail for stop in self._stop):
            return False
        return self._first_stop(self._decode(token_ids), token_ids) is not None

    def _tail_begin(self, token_ids: Sequence[int]) -> int:
        """Return the first token that a stop string ending in the last token could span."""
        begin, num_left = len(token_ids), self._window
        while begin and num_left:
            begin -= 1
            num_left -= token_ids[begin] not in self._special_ids
        return begin

    def _first_stop(self, text: str, token_ids: Sequence[int]) -> tuple[int, str] | None:
        """Return the position of the first stop string that counts, and the string; None if there is none."""
        least = self._params.min_new_tokens
        held_back = len(self._decode(token_ids[:least])) if self._stop and least else 0
        found = ((text.find(stop, max(0, held_back - len(stop) + 1)), stop) for stop in self._stop)
        return min((each for each in found if each[0] >= 0), default=None, key=lambda each: each[0])

    def _decode(self, token_ids: Sequence[int], behind: PromptEnd | None = None) -> str:
        if self._tokenizer is None:
            return ""
        end = self._prompt_end if behind is None else behind
        skips_special = self._params.skip_special_tokens
        return added_text(end.text, decode(self._tokenizer, [*end.token_ids, *token_ids], skips_special=skips_special))
