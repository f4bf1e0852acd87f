"""Completions of prompts, and the seeds of their random draws."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final, Self

from zinfer.requests.logprobs import Logprobs

NOT_FINITE: Final = (
    "the model's logits are not finite numbers (its weights may be damaged), or the row's own settings leave no token"
)

DRAWN_SEED_BITS: Final = 53
"""Of a random seed: clients that hold JSON's numbers as float64 give it back unchanged."""


def not_finite(where: str | None, error: str = NOT_FINITE) -> str:
    """Return the error, with the module that first produced non-finite numbers, if known."""
    return f"{error}; the first non-finite numbers come from {where}" if where else error


@dataclass(frozen=True)
class Completion:
    """The completion of a prompt.

    Attributes:
        prompt_index: index of the prompt, from 0.
        sample_index: index among its ``n`` completions, from 0.
        text: what the tokens add to the prompt's text, a first space too; without end and special tokens, cut before
            the first stop string, unless the params keep them; empty without a tokenizer.
        token_ids: the generated tokens, including the one that ended the sequence.
        finish_reason: "stop" (an end token or a stop string), "length", "error", or "cancelled" with a partial result.
        logprobs: for each token, if requested.
        error: error message; None if there was no error.
        prompt_logprobs: for each token of the prompt, if requested; None for those before the first one that is scored.
        prompt_token_ids: the prompt's tokens; empty if it could not be used.
        seed: of its draws: a request for one completion with it gets the same tokens. None: it was greedy.
        stop_reason: the member of ``stop`` or ``stop_token_ids`` that ended it; None if something else did, such as an
            end token of the model.
        is_invalid: whether its error is the request's, not the model's.
    """

    prompt_index: int
    sample_index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    logprobs: tuple[Logprobs, ...] | None = None
    error: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: tuple[Logprobs | None, ...] | None = None
    seed: int | None = None
    prompt_token_ids: tuple[int, ...] = ()
    is_invalid: bool = False

    @classmethod
    def failed(cls, prompt_index: int, sample_index: int, error: str) -> Self:
        """Return the completion of a request that was refused before it began."""
        return cls(prompt_index, sample_index, "", (), "error", error=error, is_invalid=True)


@dataclass(frozen=True)
class CompletionDelta:
    """An increment of a completion.

    Attributes:
        prompt_index, sample_index: as in `Completion`.
        text: new text; all deltas joined are the completion's text. Partial characters and possible stop strings are
            held back, so it may be empty, or belong to earlier tokens.
        token_ids: new tokens; one, except in the last delta.
        logprobs: for these tokens, if requested.
        completion: the whole completion in the last delta; None in others.
        prompt_logprobs: in the first delta, as in `Completion`.
    """

    prompt_index: int
    sample_index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprobs, ...] | None = None
    completion: Completion | None = None
    prompt_logprobs: tuple[Logprobs | None, ...] | None = None

    @classmethod
    def refused(cls, completion: Completion) -> Self:
        """Return the only delta of a completion that failed before it began."""
        return cls(completion.prompt_index, completion.sample_index, "", (), None, completion)

    @classmethod
    def of(cls, result: "Completion | CompletionDelta") -> "CompletionDelta":
        """Return a delta as it is, and a completion as the only delta of one that nobody reads token by token."""
        return result if isinstance(result, CompletionDelta) else cls.refused(result)

    def joined(self, later: "CompletionDelta") -> "CompletionDelta":
        """Return this and the next delta of the same completion as one."""
        logprobs = self.logprobs if later.logprobs is None else (*(self.logprobs or ()), *later.logprobs)
        return CompletionDelta(
            self.prompt_index,
            self.sample_index,
            self.text + later.text,
            self.token_ids + later.token_ids,
            logprobs,
            later.completion,
            later.prompt_logprobs if self.prompt_logprobs is None else self.prompt_logprobs,
        )


def choose_seed(stated: int | None, token_ids: Sequence[int], sample: int) -> int:
    """Return a sequence's seed: a random one if none is stated, else the stated one, hashed with the sample after 0.

    A negative one is read as an unsigned number of 64 bits.
    """
    if stated is None:
        return secrets.randbits(DRAWN_SEED_BITS)
    stated %= 2**64
    if sample == 0:
        return stated
    key = f"{stated} {sample} {list(token_ids)}".encode()
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "little")
