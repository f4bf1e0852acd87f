"""What is asked of a model at once: how many prompts, how long, and how many tokens after each. It computes nothing."""

from dataclasses import dataclass, fields

from zinfer.errors import ConfigError


@dataclass(frozen=True)
class Request:
    """One batch: every prompt is padded to ``prompt_len`` tokens and gets ``new_tokens`` more.

    Raises:
        ConfigError: one of the three is not a whole number of at least 1.
    """

    batch_size: int
    prompt_len: int
    new_tokens: int

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{field.name} is {value!r}; give a whole number of at least 1")

    @property
    def total_len(self) -> int:
        """Tokens of one sequence at its end."""
        return self.prompt_len + self.new_tokens

    def __str__(self) -> str:
        return f"{self.batch_size:,} prompts of {self.prompt_len:,} tokens, {self.new_tokens:,} new ones each"
