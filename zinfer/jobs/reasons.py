"""Why rows failed, in a word or two, for the summary; the rows themselves say it in full."""

from typing import Final

from zinfer.jobs.rows import BadRow

_WORDS: Final = (
    ("not finite", "no finite logits"),
    ("more than", "too long"),
    ("leaves no room", "too long"),
    ("KV cache", "too long"),
    ("template", "refused by the chat template"),
)


def reason_of(error: str) -> str:
    """The kind of a row's error."""
    return next((reason for words, reason in _WORDS if words in error), "other")


def reason_of_bad(row: BadRow) -> str:
    """The kind of what is wrong with a row that was not computed."""
    return "malformed" if row.is_malformed else reason_of(row.message)
