"""Generation parameters by DeepSpeed-MII's names, with its defaults: sampled, with ``top_p`` 0.9."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from zinfer.errors import ConfigError
from zinfer.requests.field_errors import field_error
from zinfer.requests.length_limits import LengthLimits
from zinfer.requests.sampling_params import FIELDS, SamplingParams

_MOST_LENGTH: Final = 1024
_DEFAULT_TOP_P: Final = 0.9


def _as_texts(value: object) -> object:
    return [] if value is None else [value] if isinstance(value, str) else value


class MIIParams(BaseModel):
    """The keywords of `generate`; None: not given.

    Attributes:
        max_length: most tokens of prompt and output together; by default 1,024, or what the context holds.
        max_new_tokens: most tokens of the output; ``max_length`` holds too.
        return_full_text: whether the text begins with the prompt.
        do_sample: false: greedy.
        stop: texts that end the output.
    """

    model_config = ConfigDict(strict=True, extra="forbid")

    max_length: Annotated[int | None, Field(ge=1)] = None
    max_new_tokens: Annotated[int | None, Field(ge=1)] = None
    min_new_tokens: Annotated[int, Field(ge=0)] = 0
    stream: bool = False
    ignore_eos: bool = False
    return_full_text: bool = False
    do_sample: bool = True
    top_p: float | None = None
    top_k: int | None = None
    temperature: float | None = None
    stop: Annotated[list[str], BeforeValidator(_as_texts), Field(description="a text or a list of texts")] = []

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> "MIIParams":
        """Validate keywords. Raises ConfigError that names the invalid one."""
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            raise ConfigError(field_error(error, cls)) from None

    @property
    def sampling(self) -> SamplingParams:
        """Sampling parameters without the number of new tokens. Raises ConfigError for a value out of range."""
        fields: dict[str, Any] = {"temperature": 0.0}
        if self.do_sample:
            fields = {"temperature": 1.0 if self.temperature is None else self.temperature, "top_k": self.top_k or 0}
            fields["top_p"] = _DEFAULT_TOP_P if self.top_p is None else self.top_p
        stated = self.model_fields_set if self.do_sample else {*fields}
        return SamplingParams(
            ignore_eos=self.ignore_eos, stop=tuple(self.stop), **fields, stated=frozenset({*stated} & {*FIELDS})
        )

    def within(self, params: SamplingParams, num_prompt: int, limits: LengthLimits) -> SamplingParams:
        """Return the parameters with the number of new tokens that a prompt of ``num_prompt`` tokens may get.

        Raises:
            ConfigError: the prompt leaves no room.
        """
        most = self.max_length
        if most is None:
            most = min(_MOST_LENGTH, limits.most_tokens or _MOST_LENGTH)
        num_left = most - num_prompt
        if num_left < 1:
            raise ConfigError(f"max_length is {most}, but the prompt has {num_prompt} tokens; raise it")
        most_new = num_left if self.max_new_tokens is None else min(num_left, self.max_new_tokens)
        return replace(params, max_new_tokens=most_new, min_new_tokens=self.min_new_tokens)
