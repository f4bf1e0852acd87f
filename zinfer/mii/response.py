"""`Response`: the generated text of a prompt, as DeepSpeed-MII returns it."""

from dataclasses import dataclass
from enum import StrEnum


class GenerationFinishReason(StrEnum):
    """Why a text ended: an end token or stop text, the number of tokens, or not yet (in a stream)."""

    STOP = "stop"
    LENGTH = "length"
    NONE = "none"


@dataclass(repr=False)
class Response:
    """The text of one prompt; printed, it is the text alone.

    Attributes:
        generated_text: new in this part, if it is one of a stream.
        prompt_length: tokens of the prompt.
        generated_length: tokens generated so far.
        finish_reason: why it ended.
    """

    generated_text: str
    prompt_length: int
    generated_length: int
    finish_reason: GenerationFinishReason

    def __repr__(self) -> str:
        return self.generated_text

    def __str__(self) -> str:
        return self.generated_text
