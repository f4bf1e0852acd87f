"""How many tokens a row's prompt and what comes after it may have, and what says so."""

from dataclasses import dataclass
from typing import Self

from torch import nn

from zinfer.model.context_length import encoder_positions, is_encoder_decoder, max_positions


@dataclass(frozen=True)
class Limit:
    """Most tokens, and what sets that limit."""

    max_tokens: int
    source: str

    def __str__(self) -> str:
        return f"{self.max_tokens} ({self.source})"


@dataclass(frozen=True)
class Room:
    """Limits of a row; None where there is none.

    Attributes:
        both: of the prompt and its new tokens together.
        prompt: of the prompt alone.
        new: of the new tokens alone.
    """

    both: Limit | None = None
    prompt: Limit | None = None
    new: Limit | None = None

    @classmethod
    def of(cls, model: nn.Module, max_out_tokens: int | None, *, generates: bool = True) -> Self:
        """Of a model, whose encoder and decoder have positions each where it has both."""
        if not is_encoder_decoder(model):
            room = cls.of_decoder(max_positions(model), max_out_tokens)
            return room if generates else cls(prompt=room.both)
        encoder, stated = _limit(encoder_positions(model), "the encoder's positions"), _stated(max_out_tokens)
        if not generates:
            return cls(prompt=_least(encoder, stated))
        decoder = _limit(max_positions(model), "the decoder's positions")
        return cls(both=_less_one(stated), prompt=encoder, new=_less_one(decoder))

    @classmethod
    def of_decoder(cls, positions: int | None, max_out_tokens: int | None) -> Self:
        """The tighter of the model's own limit and the configuration's."""
        return cls(both=_least(_limit(positions, "the model's positions"), _stated(max_out_tokens)))

    def most_new(self, num_prompt: int) -> int | None:
        """How many new tokens there is room for behind a prompt; None: no limit."""
        after = None if self.both is None else self.both.max_tokens - num_prompt
        own = None if self.new is None else self.new.max_tokens
        return min((most for most in (after, own) if most is not None), default=None)

    def problem(self, num_prompt: int, num_new: int) -> str | None:
        """What is wrong with a prompt of so many tokens, and the remedy; None where nothing is."""
        if self.prompt is not None and num_prompt > self.prompt.max_tokens:
            return f"the prompt's {num_prompt} tokens are more than {self.prompt}; shorten it"
        if self.new is not None and num_new > self.new.max_tokens:
            return f"{num_new} new tokens are more than {self.new}; ask for at most {self.new.max_tokens}"
        if self.both is None or num_prompt + num_new <= self.both.max_tokens:
            return None
        num_left = self.both.max_tokens - num_prompt
        if num_left <= 0:
            problem = f"the prompt has {num_prompt} tokens, which leaves no room for new ones within {self.both}"
            return f"{problem}; shorten it"
        return (
            f"the prompt's {num_prompt} tokens and {num_new} new ones are more than {self.both}; "
            f"shorten it or ask for at most {num_left} new tokens"
        )


def _limit(max_tokens: int | None, source: str) -> Limit | None:
    return None if max_tokens is None else Limit(max_tokens, source)


def _stated(max_out_tokens: int | None) -> Limit | None:
    return _limit(max_out_tokens, "max_out_tokens")


def _least(*limits: Limit | None) -> Limit | None:
    """The tightest; of equal ones the first."""
    return min((limit for limit in limits if limit is not None), key=lambda limit: limit.max_tokens, default=None)


def _less_one(limit: Limit | None) -> Limit | None:
    """A decoder begins with a token of its own."""
    return limit and Limit(limit.max_tokens - 1, f"{limit.source}, less the decoder's first token")
