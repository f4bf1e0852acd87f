"""`LengthLimits`: how many tokens a prompt and what is generated after it may have, and what sets each limit.

Every check of a length asks it, so that `LLM`, jobs, plans and `engine.generate` refuse alike. Read a model's with
`zinfer.model.context_length.read_limits`.
"""

from dataclasses import dataclass
from typing import Final

_STATED: Final = "max_out_tokens"


@dataclass(frozen=True)
class Limit:
    """Most tokens, and what sets that limit."""

    max_tokens: int
    source: str

    def __str__(self) -> str:
        return f"{self.max_tokens} ({self.source})"


@dataclass(frozen=True)
class LengthLimits:
    """Limits of one request; None where there is none.

    Attributes:
        total: of the prompt and its new tokens together.
        prompt: of the prompt alone.
        new: of the new tokens alone.
    """

    total: Limit | None = None
    prompt: Limit | None = None
    new: Limit | None = None

    @classmethod
    def of_decoder(cls, positions: int | None, max_out_tokens: int | None) -> "LengthLimits":
        """The tighter of the model's positions and the configuration's limit."""
        return cls(total=_tighter((positions, "the model's positions"), (max_out_tokens, _STATED)))

    @classmethod
    def of_encoder_decoder(
        cls, encoder_positions: int | None, decoder_positions: int | None, max_out_tokens: int | None
    ) -> "LengthLimits":
        """The encoder's positions for the prompt, the decoder's for the new tokens, the configuration's for both.

        A decoder begins with a token of its own.
        """
        total, prompt, new = (
            _tighter((max_out_tokens, _STATED), spare=1),
            _tighter((encoder_positions, "the encoder's positions")),
            _tighter((decoder_positions, "the decoder's positions"), spare=1),
        )
        return cls(total, prompt, new)

    @classmethod
    def of_encoder(cls, positions: int | None, source: str, max_out_tokens: int | None) -> "LengthLimits":
        """For prompts that nothing is generated after; ``source`` names whose positions these are."""
        return cls(prompt=_tighter((positions, source), (max_out_tokens, _STATED)))

    @property
    def most_tokens(self) -> int | None:
        """Most tokens of a prompt and its new ones together."""
        return None if self.total is None else self.total.max_tokens

    def most_new(self, num_prompt: int) -> int | None:
        """Most new tokens after a prompt of so many; None: no limit."""
        after = None if self.total is None else self.total.max_tokens - num_prompt
        own = None if self.new is None else self.new.max_tokens
        return min((most for most in (after, own) if most is not None), default=None)

    def problem(self, num_prompt: int, num_new: int, what: str = "the prompt") -> str | None:
        """Say what is wrong with a prompt of so many tokens, and the remedy; None where nothing is.

        Args:
            num_prompt: tokens of the prompt.
            num_new: tokens generated after it.
            what: the prompt's name in the sentence.
        """
        for limit in (self.prompt, self.total if num_new == 0 else None):
            if limit is not None and num_prompt > limit.max_tokens:
                return f"{what}'s {num_prompt} tokens are more than {limit}; shorten it"
        if self.new is not None and num_new > self.new.max_tokens:
            return f"{num_new} new tokens are more than {self.new}; ask for at most {self.new.max_tokens}"
        if self.total is None or num_prompt + num_new <= self.total.max_tokens:
            return None
        num_left = self.total.max_tokens - num_prompt
        if num_left <= 0:
            return f"{what} has {num_prompt} tokens, which leaves no room for new ones within {self.total}; shorten it"
        return (
            f"{what}'s {num_prompt} tokens and {num_new} new ones are more than {self.total}; "
            f"shorten it or ask for at most {num_left} new tokens"
        )


NO_LIMITS = LengthLimits()


def _tighter(*limits: tuple[int | None, str], spare: int = 0) -> Limit | None:
    """The tightest of the limits that there are, the first of equal ones; less a decoder's first token."""
    given = [(most - spare, source) for most, source in limits if most is not None]
    if not given:
        return None
    most, source = min(given, key=lambda each: each[0])
    return Limit(most, f"{source}, less the decoder's first token" if spare else source)
