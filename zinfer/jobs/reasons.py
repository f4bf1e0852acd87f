"""Why rows failed, in a word or two, for the summary; the rows themselves say it in full."""

from typing import Final

_WORDS: Final = (
    ("not finite", "no finite logits"),
    ("more than", "too long"),
    ("leaves no room", "too long"),
    ("KV cache", "too long"),
    ("template", "refused by the chat template"),
)


def reason_of(error: str) -> str:
    """The kind of a row's error; what is none of the usual ones is a malformed row."""
    return next((reason for words, reason in _WORDS if words in error), "malformed")
