"""Reads the JSON bodies of requests, with errors that name field and remedy."""

from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from zinfer.errors import ConfigError
from zinfer.requests.field_errors import field_error
from zinfer.requests.json_object import check_unicode, read_object

_Model = TypeVar("_Model", bound=BaseModel)


async def read_record(request: Request) -> dict[str, Any]:
    """Return the JSON object of a body. Raises ConfigError if it is none."""
    record = read_object(await request.body(), "the body")
    check_unicode(record)
    return record


async def read_model(request: Request, kind: type[_Model]) -> _Model:
    """Return a body, validated. Raises ConfigError that names the invalid field."""
    record = await read_record(request)
    try:
        return kind.model_validate(record)
    except ValidationError as error:
        raise ConfigError(field_error(error, kind)) from None
