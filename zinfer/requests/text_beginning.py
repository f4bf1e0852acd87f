"""Refuses a text that is far too long by its beginning: to encode all of it could take minutes.

The characters alone tell nothing: one token may stand for a long word, or for any number of blanks that the tokenizer
drops.
"""

from collections.abc import Callable, Sized
from typing import Final

from zinfer.errors import ConfigError
from zinfer.requests.length_limits import Limit

_CHARACTERS: Final = 16
"""Of a beginning, for each token that the limit allows; usual texts have about 4."""
_LONGER: Final = 4
"""Times that a beginning with few tokens grows."""
_SPARE_TOKENS: Final = 256
"""How many more tokens a beginning may have than the whole text: where it is cut, a word falls into several tokens."""


def check_beginning(text: str, limit: Limit, encode: Callable[[str], Sized]) -> None:
    """Raise ConfigError if a beginning of a text has clearly more tokens than the limit.

    Args:
        encode: returns the tokens of a text.
    """
    num_characters = _CHARACTERS * (limit.max_tokens + _SPARE_TOKENS)
    while num_characters < len(text):
        num_tokens = len(encode(text[:num_characters]))
        if num_tokens > limit.max_tokens + _SPARE_TOKENS:
            part = f"the prompt's first {num_characters:,} characters of {len(text):,}"
            raise ConfigError(f"{part} have {num_tokens:,} tokens, which are more than {limit}; shorten it")
        num_characters *= _LONGER
