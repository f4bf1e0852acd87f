"""Type-checked objects of config.json's ``quantization_config``, which is untrusted input; errors name the key."""

from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from zinfer.checkpoint.faults import MAX_NAME
from zinfer.errors import CheckpointError

PATH: Final = "quantization_config"
REMEDY: Final = "use the full-precision checkpoint and quantize it while loading"
_UNSUPPORTED: Final = "unsupported"


def unsupported(reason: str) -> PydanticCustomError:
    """Return the error to raise in a validator for a valid value that is not supported."""
    return PydanticCustomError(_UNSUPPORTED, "{reason}", {"reason": reason})


def malformed(reason: str) -> PydanticCustomError:
    """Return the error to raise in a validator for an invalid value."""
    return PydanticCustomError("malformed", "{reason}", {"reason": reason})


class Section(BaseModel):
    """An object of the configuration; unknown members are ignored, and null members count as absent."""

    model_config = ConfigDict(strict=True, frozen=True, validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _normalized(cls, members: Any) -> Any:
        """Drop null members and lower-case strings: tools differ in how they write these."""
        if not isinstance(members, Mapping):
            return members
        stated = {key: value for key, value in members.items() if value is not None}
        return {key: value.lower() if isinstance(value, str) else value for key, value in stated.items()}


def _nothing(value: object) -> object:
    if value:
        raise unsupported("that is not supported")
    return value


Nothing = Annotated[Any, AfterValidator(_nothing)]
"""A member whose value must be absent, false or empty."""


def _group_size(value: int) -> int | None:
    if value < 1 and value != -1:
        raise malformed("neither -1 nor a number of columns")
    return None if value == -1 else value


GroupSize = Annotated[int | None, AfterValidator(_group_size)]
"""Columns that share a scale; None for whole rows, which GPTQ and AWQ write as -1."""


def refusal(error: ValidationError) -> CheckpointError:
    """Return the error to raise for the first fault of a section: names the key, its value, and what to do."""
    fault = error.errors()[0]
    kind = fault["type"]
    shown = "missing" if kind == "missing" else repr(fault["input"])
    shown = shown if len(shown) <= MAX_NAME else f"{shown[:MAX_NAME]}..."
    path = ".".join((PATH, *map(str, fault["loc"])))
    remedy = REMEDY if kind in (_UNSUPPORTED, "literal_error") else "restore config.json"
    return CheckpointError(f"config.json: {path} is {shown}: {fault['msg']}; {remedy}")
