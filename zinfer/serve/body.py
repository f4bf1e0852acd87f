"""Reads the JSON bodies of requests, with errors that name field and remedy."""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from zinfer.errors import ConfigError
from zinfer.requests.client_names import invalid_body
from zinfer.requests.json_object import read_text_object

_Model = TypeVar("_Model", bound=BaseModel)
_T = TypeVar("_T")
_MAX_AT_ONCE: Final = 16 << 10
_MAX_FIELDS: Final = 1024
_LARGE: Final = ThreadPoolExecutor(2, "zinfer-body")
"""Few threads: each of them that computes in Python delays the event loop by some milliseconds."""


async def read_record(request: Request, then: Callable[[dict[str, Any]], _T]) -> _T:
    """Return what `then` makes of the JSON object of a body. Raises ConfigError if it is none, and what it raises."""
    return await beside_loop(len(body := await request.body()), lambda: then(_record(body)))


async def read_model(request: Request, kind: type[_Model]) -> _Model:
    """Return a body, validated. Raises FieldError, or ConfigError if it is no JSON object."""
    return await read_call(request, kind, lambda body: body)


async def read_call(request: Request, kind: type[_Model], then: Callable[[_Model], _T]) -> _T:
    """Return what `then` makes of a validated body: all work that grows with the body, but for that on its prompts.

    Raises:
        FieldError, ConfigError: as `read_model`; and what `then` raises.
    """
    return await beside_loop(len(body := await request.body()), lambda: then(_validated(kind, body)))


async def beside_loop(num_bytes: int, work: Callable[[], _T]) -> _T:
    """Return the result of work on so many bytes; of many, on a thread, because others' tokens must not wait."""
    return work() if num_bytes <= _MAX_AT_ONCE else await asyncio.get_running_loop().run_in_executor(_LARGE, work)


def _record(body: bytes) -> dict[str, Any]:
    record = read_text_object(body, "the body")
    if len(record) > _MAX_FIELDS:
        raise ConfigError(f"the body has {len(record):,} fields; {_MAX_FIELDS:,} at most are supported")
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
