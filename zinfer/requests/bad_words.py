"""Words that a row's output may not have, as tokens."""

from collections.abc import Iterator, Sequence
from typing import Any

from zinfer.errors import ConfigError


def find_bad_word_ids(tokenizer: Any, words: Sequence[str], vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Each word's tokens; also those after a space, as in vLLM, where they are as many and begin with another token.

    Raises:
        ConfigError: there is no tokenizer, or a word has no tokens that the model knows.
    """
    if not words:
        return ()
    if tokenizer is None:
        raise ConfigError("bad_words need a tokenizer; give token ids a logit_bias of -100 instead")
    found = []
    for word in words:
        bare, spaced = (_token_ids(tokenizer, word, prefix + word.lstrip()) for prefix in ("", " "))
        if not bare:
            raise ConfigError(f"bad_words: {word!r:.60} has no tokens; leave it out")
        if (largest := max(bare + spaced)) >= vocab_size:
            raise ConfigError(
                f"bad_words: {word!r:.60} has token {largest}, but the model's vocabulary ends at {vocab_size - 1}; "
                "leave it out"
            )
        found.append(bare)
        if len(spaced) == len(bare) and spaced[0] != bare[0]:
            found.append(spaced)
    return tuple(found)


def last_ids(bad_word_ids: Sequence[tuple[int, ...]], output_ids: Sequence[int]) -> Iterator[int]:
    """The tokens that would complete a word: its last, where the output ends with all before it."""
    for *before, last in bad_word_ids:
        if len(before) <= len(output_ids) and list(output_ids[len(output_ids) - len(before) :]) == before:
            yield last


def _token_ids(tokenizer: Any, word: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
    except (TypeError, ValueError) as error:  # half of a surrogate pair, for one
        raise ConfigError(f"bad_words: the tokenizer refuses {word!r:.60}: {error}") from error
