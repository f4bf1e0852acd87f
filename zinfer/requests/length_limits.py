"""`LengthLimits`: how many tokens a prompt and what is generated after it may have, and what sets each limit.

Every check of a length asks it, so that `LLM`, jobs, plans and `engine.generate` refuse alike. Read a model's with
`zinfer.model.context_length.read_limits`.
"""

from dataclasses import dataclass


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
        return cls(total=_tighter(_limit(positions, "the model's positions"), _stated(max_out_tokens)))

    @classmethod
    def of_encoder_decoder(
        cls, encoder_positions: int | None, decoder_positions: int | None, max_out_tokens: int | None
    ) -> "LengthLimits":
        """The encoder's positions for the prompt, the decoder's for the new tokens, the configuration's for both."""
        decoder = _limit(decoder_positions, "the decoder's positions")
        return cls(
            total=_less_one(_stated(max_out_tokens)),
            prompt=_limit(encoder_positions, "the encoder's positions"),
            new=_less_one(decoder),
        )

    @classmethod
    def of_encoder(cls, positions: int | None, source: str, max_out_tokens: int | None) -> "LengthLimits":
        """For prompts that nothing is generated after; ``source`` names whose positions these are."""
        return cls(prompt=_tighter(_limit(positions, source), _stated(max_out_tokens)))

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


def _limit(max_tokens: int | None, source: str) -> Limit | None:
    return None if max_tokens is None else Limit(max_tokens, source)


def _stated(max_out_tokens: int | None) -> Limit | None:
    return _limit(max_out_tokens, "max_out_tokens")


def _tighter(*limits: Limit | None) -> Limit | None:
    """The tightest; of equal ones the first."""
    return min((limit for limit in limits if limit is not None), key=lambda limit: limit.max_tokens, default=None)


def _less_one(limit: Limit | None) -> Limit | None:
    """A decoder begins with a token of its own."""
    return limit and Limit(limit.max_tokens - 1, f"{limit.source}, less the decoder's first token")
