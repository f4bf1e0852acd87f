"""Reads the JSON bodies of requests, with errors that name field and remedy."""

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from zinfer.requests.client_names import invalid_body
from zinfer.requests.json_object import check_unicode, read_object

_Model = TypeVar("_Model", bound=BaseModel)
_T = TypeVar("_T")
_MOST_AT_ONCE: Final = 128 << 10


async def read_record(request: Request) -> dict[str, Any]:
    """Return the JSON object of a body. Raises ConfigError if it is none."""
    return await _read(request, _record)


async def read_model(request: Request, kind: type[_Model]) -> _Model:
    """Return a body, validated. Raises FieldError, or ConfigError if it is no JSON object."""
    return await _read(request, partial(_validated, kind))


async def _read(request: Request, parse: Callable[[bytes], _T]) -> _T:
    """Parse a body; a large one on a thread, because 16 MiB can take seconds, and others' tokens must not wait."""
    body = await request.body()
    return parse(body) if len(body) <= _MOST_AT_ONCE else await asyncio.to_thread(parse, body)


def _record(body: bytes) -> dict[str, Any]:
    record = read_object(body, "the body")
    check_unicode(record)
    return record


def _validated(kind: type[_Model], body: bytes) -> _Model:
    record = _record(body)
    try:
        return kind.model_validate(record)
    except ValidationError as error:
        raise invalid_body(error, kind) from None


def described(kind: type[BaseModel], **fields: Any) -> dict[str, Any]:
    """Describe a body in the OpenAPI schema, as `openapi_extra`: it is read by `read_model`, not by FastAPI.

    Args:
        fields: JSON schemas of required fields that the route reads besides the model's.
    """
    schema = kind.model_json_schema()
    whole = _inlined(schema, schema.pop("$defs", {}))
    if fields:
        whole["properties"] = {**fields, **whole["properties"]}
        whole["required"] = [*fields, *whole.get("required", ())]
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": whole}}}}


def _inlined(schema: Any, definitions: Mapping[str, Any]) -> Any:
    """Return a schema with the definitions that it refers to in their places."""
    if isinstance(schema, list):
        return [_inlined(each, definitions) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    return {name: _inlined(each, definitions) for name, each in schema.items()}
