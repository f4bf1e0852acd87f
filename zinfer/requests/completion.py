"""What came after a prompt, and the seed of its draws."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final, Self

from zinfer.requests.logprobs import Logprobs

NOT_FINITE: Final = (
    "the model's logits are not finite numbers (its weights may be damaged), or the row's own settings leave no token"
)


def not_finite(where: str | None, error: str = NOT_FINITE) -> str:
    """The error, and what made such numbers first, if that was seen."""
    return f"{error}; the first that are not come from {where}" if where else error


@dataclass(frozen=True)
class Completion:
    """What came after one prompt.

    Attributes:
        prompt_index: which of the prompts, from 0.
        sample_index: which of its ``n`` completions, from 0.
        text: without end and special tokens, cut before the first stop string, unless its params want them; empty
            without a tokenizer.
        token_ids: what was generated, the token that ended it included.
        finish_reason: "stop" (an end token or a stop string), "length", "error", or "cancelled" with what there was.
        logprobs: of each token, where they were asked for.
        error: what is wrong with the prompt, or went wrong; None where nothing did.
        stop_reason: which of ``stop`` or ``stop_token_ids`` ended it; None where something else did, an end token of
            the model's own among them.
    """

    prompt_index: int
    sample_index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    logprobs: tuple[Logprobs, ...] | None = None
    error: str | None = None
    stop_reason: int | str | None = None

    @classmethod
    def failed(cls, prompt_index: int, sample_index: int, error: str) -> Self:
        """One that never began."""
        return cls(prompt_index, sample_index, "", (), "error", error=error)


@dataclass(frozen=True)
class CompletionDelta:
    """What a completion has grown by.

    Attributes:
        prompt_index, sample_index: as `Completion`'s.
        text: what its text grows by; all deltas joined are the completion's. Never half a character, and
            nothing that a stop string takes back: so it may be empty, or belong to tokens before.
        token_ids: its next tokens, one but for the last delta.
        logprobs: of these, where they were asked for.
        completion: the whole, with the last delta; None with others.
    """

    prompt_index: int
    sample_index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprobs, ...] | None = None
    completion: Completion | None = None

    @classmethod
    def refused(cls, completion: Completion) -> Self:
        """The one delta of a completion that never began."""
        return cls(completion.prompt_index, completion.sample_index, "", (), None, completion)


def text_seed(stated: int | None, token_ids: Sequence[int], repeat: int, sample: int) -> int:
    """A text's seed: the stated one, else what the prompt decides and how often it came before in the call."""
    if stated is not None and sample == 0:
        return stated
    key = f"{repeat if stated is None else stated} {sample} {list(token_ids)}".encode()
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "little")
