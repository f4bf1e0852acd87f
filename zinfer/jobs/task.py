"""What a job makes of its rows. Imports nothing heavy: the command line needs these names for `--help`."""

from enum import StrEnum


class Task(StrEnum):
    """What comes after a prompt, the embedding of its text, or the text's label."""

    GENERATE = "generate"
    EMBED = "embed"
    CLASSIFY = "classify"


class Pooling(StrEnum):
    """One vector of a text's many: the mean over its tokens, or the first token's."""

    MEAN = "mean"
    CLS = "cls"
