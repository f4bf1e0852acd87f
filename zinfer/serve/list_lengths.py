"""Limits of the lists in a request's body, checked before anything looks at their items."""

from collections.abc import Mapping
from typing import Any, Final

from zinfer.requests.client_names import FieldError

_MOST_TEXTS: Final = {"stop": 256, "bad_words": 1024}
"""OpenAI takes 4 texts of `stop`. Each is looked for in the output of each pass."""
_MOST_CHARACTERS: Final = 1 << 16
"""Of all texts of one field together."""
_OF_TOKENS: Final = ("stop_token_ids", "allowed_token_ids", "logit_bias")
_MOST_TOOLS: Final = 1024
"""OpenAI takes 128. The prompt holds all of them."""


def check_lists(record: Mapping[str, Any], vocab_size: int) -> None:
    """Check the lists of a body, or of `SamplingParams`; what their items are is checked elsewhere.

    Raises:
        FieldError: one is too long.
    """
    for name, most in _MOST_TEXTS.items():
        texts = record.get(name)
        several = [texts] if isinstance(texts, str) else texts if isinstance(texts, list | tuple) else []
        if len(several) > most:
            raise FieldError(f"{name} takes {most:,} texts at most, not {len(several):,}", name)
        if (num := sum(len(each) for each in several if isinstance(each, str))) > _MOST_CHARACTERS:
            raise FieldError(f"{name} takes {_MOST_CHARACTERS:,} characters at most, not {num:,}", name)
    if isinstance(tools := record.get("tools"), list) and len(tools) > _MOST_TOOLS:
        raise FieldError(f"tools takes {_MOST_TOOLS:,} functions at most, not {len(tools):,}", "tools")
    for name in _OF_TOKENS:
        ids = record.get(name)
        if isinstance(ids, list | tuple | Mapping) and len(ids) > vocab_size:
            most_ids = f"{vocab_size:,} token ids at most, which is the model's whole vocabulary"
            raise FieldError(f"{name} takes {most_ids}, not {len(ids):,}", name)
