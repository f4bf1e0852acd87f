"""Token ids of words that an output must not contain."""

from collections.abc import Iterator, Sequence
from typing import Any

from zinfer.errors import ConfigError


def find_bad_word_ids(tokenizer: Any, words: Sequence[str], vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of each word.

    As in vLLM, the word after a space is included too, if it has as many tokens and begins with another one.

    Raises:
        ConfigError: there is no tokenizer, or a word has no tokens in the model's vocabulary.
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
    """Return the tokens that would complete a bad word: its last one, if the output ends with all others."""
    for *before, last in bad_word_ids:
        if len(before) <= len(output_ids) and list(output_ids[len(output_ids) - len(before) :]) == before:
            yield last


def _token_ids(tokenizer: Any, word: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
    except (TypeError, ValueError) as error:  # for example a lone surrogate
        raise ConfigError(f"bad_words: the tokenizer refuses {word!r:.60}: {error}") from error
