"""`LengthLimits`: the maximum tokens of a prompt and its new tokens, and the source of each limit.

`LLM`, jobs, plans and `engine.generate` all use it, so they refuse the same requests.
`zinfer.model.context_length.read_limits` reads a model's limits.
"""

from dataclasses import dataclass, replace
from typing import Final

from zinfer.errors import ConfigError

DEFAULT_NEW_TOKENS: Final = 128
"""Default of `max_new_tokens`, unless the model's context leaves fewer."""
_STATED: Final = "max_out_tokens"


@dataclass(frozen=True)
class Limit:
    """A maximum number of tokens, and its source."""

    max_tokens: int
    source: str

    def __str__(self) -> str:
        return f"{self.max_tokens} ({self.source})"


@dataclass(frozen=True)
class LengthLimits:
    """Limits of one request; None means no limit.

    Attributes:
        total: for the prompt and its new tokens together.
        prompt: for the prompt alone.
        new: for the new tokens alone.
    """

    total: Limit | None = None
    prompt: Limit | None = None
    new: Limit | None = None

    @classmethod
    def of_decoder(cls, positions: int | None, max_out_tokens: int | None) -> "LengthLimits":
        """Return the smaller of the model's positions and the configured limit."""
        return cls(total=_tighter((positions, "the model's positions"), (max_out_tokens, _STATED)))

    @classmethod
    def of_encoder_decoder(
        cls, encoder_positions: int | None, decoder_positions: int | None, max_out_tokens: int | None
    ) -> "LengthLimits":
        """Limit the prompt by the encoder's positions, new tokens by the decoder's, and both by the configuration.

        The decoder's start token takes one position.
        """
        total, prompt, new = (
            _tighter((max_out_tokens, _STATED), spare=1),
            _tighter((encoder_positions, "the encoder's positions")),
            _tighter((decoder_positions, "the decoder's positions"), spare=1),
        )
        return cls(total, prompt, new)

    @classmethod
    def of_encoder(cls, positions: int | None, source: str, max_out_tokens: int | None) -> "LengthLimits":
        """Return limits for prompts without new tokens; ``source`` describes ``positions``."""
        return cls(prompt=_tighter((positions, source), (max_out_tokens, _STATED)))

    def within(self, max_tokens: int, source: str) -> "LengthLimits":
        """Limit a prompt and its new tokens together to ``max_tokens`` too; ``source`` says what does."""
        own = () if self.total is None else ((self.total.max_tokens, self.total.source),)
        return replace(self, total=_tighter(*own, (max_tokens, source)))

    @property
    def most_tokens(self) -> int | None:
        """Maximum tokens of a prompt and its new tokens together."""
        return None if self.total is None else self.total.max_tokens

    @property
    def prompt_limit(self) -> Limit | None:
        """Maximum tokens of a prompt, whatever follows it."""
        given = [each for each in (self.prompt, self.total) if each is not None]
        return min(given, key=lambda each: each.max_tokens, default=None)

    def most_new(self, num_prompt: int) -> int | None:
        """Return the maximum new tokens after ``num_prompt`` tokens; None: no limit."""
        after = None if self.total is None else self.total.max_tokens - num_prompt
        own = None if self.new is None else self.new.max_tokens
        return min((most for most in (after, own) if most is not None), default=None)

    def problem(self, num_prompt: int, num_new: int, what: str = "the prompt") -> str | None:
        """Return an error message with the remedy if the lengths exceed a limit, else None.

        Args:
            num_prompt: tokens of the prompt.
            num_new: tokens generated after it.
            what: name of the prompt in the message.
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
    """Return the smallest limit that is not None, less ``spare``; the first of equal ones."""
    given = [(most - spare, source) for most, source in limits if most is not None]
    if not given:
        return None
    most, source = min(given, key=lambda each: each[0])
    return Limit(most, f"{source}, less the decoder's first token" if spare else source)


def check_min_out_tokens(positions: int | None, min_out_tokens: int) -> None:
    """Raise ConfigError if a model has fewer positions than ``min_out_tokens``."""
    if positions is not None and min_out_tokens > positions:
        raise ConfigError(
            f"min_out_tokens is {min_out_tokens}, but the model has positions for {positions} tokens; lower it"
        )
