"""The form that an output must have: JSON, a regular expression, one of several texts, or a grammar.

Names follow vLLM's StructuredOutputsParams; `structure_of_response_format` reads OpenAI's `response_format`.
"""

import json as json_text
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import wraps
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from zinfer.errors import ConfigError
from zinfer.requests.field_errors import field_error, short

MOST_CHARACTERS: Final = 1 << 18
"""Of a form's text. The time to compile some grammars grows with the square of it."""


def _as_schema_text(value: object) -> object:
    """Convert a schema to its JSON text, so that it is immutable."""
    if isinstance(value, str):
        try:
            value = json_text.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the schema is not JSON: {error}") from error
    if not isinstance(value, Mapping):
        return value
    try:
        return json_text.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"the schema is not JSON: {error}") from error


def _as_choices(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


@dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class StructuredOutputsParams:
    """What the whole output must be; exactly one of these. Invalid values raise ConfigError.

    json: of this JSON schema, an object or its text; kept as text. json_object: true: any JSON object.
    regex: what this regular expression matches, in Rust's syntax: without look-around and backreferences.
    choice: one of these texts. grammar: what a context-free grammar in llguidance's variant of Lark's syntax derives.
    """

    json: Annotated[
        str | dict[str, Any] | None,
        BeforeValidator(_as_schema_text),
        Field(description="a JSON schema, an object or its text"),
    ] = None
    regex: Annotated[str | None, Field(description="a regular expression")] = None
    choice: Annotated[
        tuple[str, ...] | None,
        BeforeValidator(_as_choices),
        Field(min_length=1, description="a list of texts, one at least"),
    ] = None
    grammar: Annotated[str | None, Field(description="a grammar in Lark's syntax")] = None
    json_object: Annotated[Literal[True] | None, Field(description="true, or left out")] = None

    @model_validator(mode="after")
    def _check_one(self) -> "StructuredOutputsParams":
        given = [name for name in _KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of {', '.join(_KINDS)}, not {', '.join(given) or 'none'}")
        texts = self.choice or (str(self.json or self.regex or self.grammar or ""),)
        if (num := sum(map(len, texts))) > MOST_CHARACTERS:
            raise ValueError(f"{given[0]} has {num:,} characters; {MOST_CHARACTERS:,} at most are supported")
        return self

    @property
    def kind(self) -> str:
        """The name of the one field that is given."""
        return next(name for name in _KINDS if getattr(self, name) is not None)


_KINDS: Final = tuple(each.name for each in fields(StructuredOutputsParams))


def _init(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``__init__`` to raise ConfigError instead of pydantic's error."""

    @wraps(init)
    def __init__(self: StructuredOutputsParams, *args: Any, **kwargs: Any) -> None:
        try:
            init(self, *args, **kwargs)
        except ValidationError as error:
            raise ConfigError(field_error(error, StructuredOutputsParams)) from None

    return __init__


StructuredOutputsParams.__init__ = _init(StructuredOutputsParams.__init__)  # type: ignore[method-assign]


def as_structure(value: object) -> object:
    """Convert a mapping of fields, as a JSON row has them, where null means not given. Raises ConfigError."""
    if not isinstance(value, Mapping):
        return value
    return StructuredOutputsParams(**{str(name): each for name, each in value.items() if each is not None})


class _JsonSchema(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class _ResponseFormat(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    type: Annotated[
        Literal["text", "json_object", "json_schema"], Field(description="'text', 'json_object' or 'json_schema'")
    ]
    json_schema: _JsonSchema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> "_ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema goes with the type 'json_schema', and only with it")
        return self


def structure_of_response_format(value: object) -> StructuredOutputsParams | None:
    """Return the form that OpenAI's ``response_format`` asks for; None for text, and for null.

    A schema is always enforced, whether ``strict`` is true or not. One without a ``schema`` is any JSON object.

    Raises:
        ConfigError: it is malformed.
    """
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ConfigError(f"response_format must be an object with a 'type', not {short(value)}")
    try:
        asked = _ResponseFormat.model_validate(value)
    except ValidationError as error:
        raise ConfigError(f"response_format: {field_error(error, _ResponseFormat)}") from None
    if asked.type == "text":
        return None
    if asked.json_schema is None or asked.json_schema.schema_ is None:
        return StructuredOutputsParams(json_object=True)
    return json_form(asked.json_schema.schema_, "response_format")


def json_form(schema: Mapping[str, Any], source: str) -> StructuredOutputsParams:
    """Return the form of a JSON schema. Raises ConfigError, which names the field that the schema is from."""
    try:
        return StructuredOutputsParams(json=dict(schema))
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error
