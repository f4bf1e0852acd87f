"""What is wrong with a field is said in words of JSON, whatever pydantic's error is and whichever request it is in."""

import importlib
import pkgutil
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

import zinfer.requests
import zinfer.serve
from zinfer.jobs import openai_batch, rows
from zinfer.requests.field_errors import MUST_BE, field_error

FOREIGN = re.compile(r"\b(tuples?|dict(ionary)?|bool(ean)?|str|int|valid|instance|Input|None|False|True)\b|list\[")
"""Words of Python and pydantic."""
PHRASED = {"missing", "extra_forbidden", "unexpected_keyword_argument", "value_error"}
"""Errors that have sentences of their own."""
BOUNDS = {
    **{"ge": "greater_than_equal", "gt": "greater_than", "le": "less_than_equal", "lt": "less_than"},
    "allow_inf_nan": "finite_number",
}
ERRORS: dict[str, set[str]] = {
    **{part: set() for part in ("any", "default", "nullable", "union", "definitions", "definition-ref")},
    **{part: set() for part in ("json-or-python", "lax-or-strict", "chain", "dataclass-field", "model-field")},
    **{f"function-{when}": {"value_error"} for when in ("before", "after", "plain", "wrap")},
    "model": {"model_type"},
    "model-fields": {"model_type", "missing", "extra_forbidden"},
    "dataclass": {"dataclass_type", "dataclass_exact_type"},
    "dataclass-args": {"missing", "unexpected_keyword_argument"},
    "str": {"string_type", "string_unicode"},
    "bool": {"bool_type", "bool_parsing"},
    "int": {"int_type", "int_from_float", "int_parsing", "int_parsing_size"},
    "float": {"float_type", "float_parsing"},
    "none": {"none_required"},
    "literal": {"literal_error"},
    "list": {"list_type"},
    "tuple": {"tuple_type"},
    "frozenset": {"frozen_set_type"},
    "dict": {"dict_type"},
    "is-instance": {"is_instance_of"},
}
"""What each part of a pydantic schema can report, besides its bounds."""
WRONG: list[Any] = [None, True, -(10**30), 2.5, float("inf"), "", "~", "\ud800", [], [7.5], [[]], [{}], {}, {"~": {}}]


def bodies() -> list[Any]:
    """All forms of what a user sends."""
    names = [
        f"{room.__name__}.{each.name}"
        for room in (zinfer.requests, zinfer.serve)
        for each in pkgutil.iter_modules(room.__path__)
    ]
    found = [
        each
        for module in (*map(importlib.import_module, names), rows, openai_batch)
        for each in vars(module).values()
        if isinstance(each, type) and each.__module__ == module.__name__
    ]
    return [each for each in found if issubclass(each, BaseModel) or hasattr(each, "__pydantic_fields__")]


def parts(schema: Any) -> Iterator[dict[str, Any]]:
    """The parts of a core schema that validate something."""
    if isinstance(schema, dict):
        is_part = isinstance(schema.get("type"), str)  # else the fields of a model
        if is_part:
            yield schema
        for name, each in schema.items():
            if not is_part or name not in ("metadata", "serialization", "config", "function"):
                yield from parts(each)
    elif isinstance(schema, list | tuple):
        for each in schema:
            yield from parts(each)


def errors_of(part: dict[str, Any]) -> set[str]:
    found = {*ERRORS[part["type"]], *(error for name, error in BOUNDS.items() if name in part)}
    is_text = part["type"] == "str"
    for name, of_text, of_list in (
        ("min_length", "string_too_short", "too_short"),
        ("max_length", "string_too_long", "too_long"),
    ):
        found |= {of_text if is_text else of_list} if name in part else set()
    return found | ({"string_pattern_mismatch"} if "pattern" in part else set())


def test_every_error_of_a_body_has_words() -> None:
    kinds = bodies()
    assert {"ChatBody", "SamplingParams", "_Score", "_Line", "Row", "MIIParams"} <= {each.__name__ for each in kinds}
    found = {error for each in kinds for part in parts(each.__pydantic_core_schema__) for error in errors_of(part)}
    assert found - PHRASED <= {*MUST_BE}
    assert not [each for each in MUST_BE.values() if FOREIGN.search(re.sub(r"{\w+}", "", each))]


@pytest.mark.parametrize("kind", bodies(), ids=lambda each: each.__name__)
def test_wrong_values_are_named_in_words_of_json(kind: Any) -> None:
    adapter = TypeAdapter(kind)
    for name, field in kind.__pydantic_fields__.items():
        for wrong in WRONG:
            alias = field.alias or name
            try:
                adapter.validate_python({alias: wrong})
            except ValidationError as error:
                of_field = [each for each in error.errors() if each["loc"][:1] == (alias,)]
                for each in of_field[:1]:
                    alone = SimpleNamespace(errors=lambda include_url, each=each: [each])
                    message = field_error(alone, kind)  # type: ignore[arg-type]
                    assert not FOREIGN.search(message.rpartition(", not ")[0] or message), message
