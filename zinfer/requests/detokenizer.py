"""Incremental detokenization that holds back partial characters and possible stop strings."""

from collections.abc import Sequence
from typing import Any

from zinfer.requests.prompt_end import NO_PROMPT, UNDECODED, PromptEnd, added_text, byte_of, decode


class Detokenizer:
    """Detokenizes one sequence incrementally: the text returned so far is always a prefix of the whole text.

    Decodes only the last tokens, together with a few whose text is known, because decoders treat the first token of a
    text differently. `tokenizers.decoders.DecodeStream` does the same, but fails if a byte token invalidates the bytes
    before it, and does not support tokenizers written in Python.

    Args:
        tokenizer: None: tokens have no text.
        stop: stop strings; text that may begin one is held back.
        skips_special: whether special tokens have no text.
        prompt_end: what the sequence goes on behind.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: Sequence[str] = (),
        *,
        skips_special: bool = True,
        prompt_end: PromptEnd = NO_PROMPT,
    ) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._longest_held = max(map(len, stop), default=1) - 1
        self._skips_special = skips_special
        self._token_ids = list(prompt_end.token_ids)  # tokens that are still decoded
        self._num_known = len(self._token_ids)  # of these, the first ones, whose text is final
        self._in_bytes = False
        self._held = ""  # final text that may begin a stop string
        self.num_tokens = 0
        self.num_chars = 0

    def add(self, token_id: int) -> str:
        """Add a token and return the text that is now final, if any; it may belong to earlier tokens."""
        self.num_tokens += 1
        if self._tokenizer is None:
            return ""
        self._token_ids.append(token_id)
        known, text = self._decode(self._token_ids[: self._num_known]), self._decode(self._token_ids)
        is_behind = text.startswith(known) or known.endswith(UNDECODED)  # a prompt may end within a character
        if not self._is_in_bytes(token_id) and is_behind and text[-1:] not in ("", UNDECODED):
            added = added_text(known, text)
            self._held += added
            if added:
                self._token_ids = self._token_ids[self._num_known :]
                self._num_known = len(self._token_ids)
        end = len(self._held) - self._num_held()
        given, self._held = self._held[:end], self._held[end:]
        self.num_chars += len(given)
        return given

    def _is_in_bytes(self, token_id: int) -> bool:
        """Whether a later byte may make this token's text invalid: a run of byte tokens is decoded as a whole."""
        if byte_of(self._tokenizer, token_id) is not None:
            self._in_bytes = True
        elif self._in_bytes:  # special tokens do not end a run: they are skipped before decoding
            self._in_bytes = not self._decode([token_id])
        return self._in_bytes

    def _num_held(self) -> int:
        """Return the length of the longest suffix that a stop string begins with."""
        lengths = range(min(len(self._held), self._longest_held), 0, -1)
        return next((each for each in lengths if any(stop.startswith(self._held[-each:]) for stop in self._stop)), 0)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return decode(self._tokenizer, token_ids, skips_special=self._skips_special)
