"""Tools of OpenAI's chats: the functions that a model may call, and whether it has to."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from zinfer.errors import ConfigError
from zinfer.requests.field_errors import cut, field_error, listed, short
from zinfer.requests.structured_outputs import StructuredOutputsParams, json_form

_CHOICES: Final = '\'none\', \'auto\', \'required\' or {"type": "function", "function": {"name": ...}}'


class _Function(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Tool(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    type: Annotated[Literal["function"], Field(description="'function'")]
    function: _Function
    cache_control: Any = None


class _NamedFunction(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    name: str


class _NamedChoice(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    type: Literal["function"]
    function: _NamedFunction


_Kind = TypeVar("_Kind", bound=BaseModel)


@dataclass(frozen=True)
class ToolUse:
    """The tools of a chat, and how the model may use them.

    Attributes:
        tools: as they are given, for the chat template.
        mode: "auto": the model calls functions if it wants to; "required": it calls one at least; "named": only `name`.
        name: of the function to call; None unless named.
        is_parallel: whether there may be several calls.
    """

    tools: Sequence[Mapping[str, Any]]
    mode: Literal["auto", "required", "named"] = "auto"
    name: str | None = None
    is_parallel: bool = True

    @property
    def structure(self) -> StructuredOutputsParams | None:
        """The form of an output that has to be calls: one function's arguments, or a list of calls; else None.

        Raises:
            ConfigError: definitions of two functions have one name.
        """
        if self.mode == "auto":
            return None
        if self.mode == "named":
            return json_form(next(_schema(each) for each in self.tools if _name(each) == self.name), "tools")
        definitions: dict[str, Any] = {}
        calls = [_call(each, definitions) for each in self.tools]
        several = {"type": "array", "minItems": 1, "items": {"anyOf": calls}, "$defs": definitions}
        return json_form(several if self.is_parallel else several | {"maxItems": 1}, "tools")


def read_tools(tools: object, tool_choice: object, parallel_tool_calls: bool | None) -> ToolUse | None:
    """Return the tools of a body; None if there are none, or none may be used.

    Raises:
        ConfigError: names what is malformed, or not supported.
    """
    named = isinstance(tool_choice, Mapping)
    if not named and tool_choice not in (None, "none", "auto", "required"):
        raise ConfigError(f"tool_choice must be {_CHOICES}, not {short(tool_choice)}")
    if tools is None or tools == []:
        if named or tool_choice == "required":
            raise ConfigError("tool_choice needs tools; give them, or leave it out")
        return None
    if not isinstance(tools, list):
        raise ConfigError(f"tools must be a list of functions, not {short(tools)}")
    names = [_read(_Tool, f"tools: tool {number}", each).function.name for number, each in enumerate(tools, start=1)]
    if twice := [name for name, num in Counter(names).items() if num > 1]:
        raise ConfigError(f"tools: two functions have the name {short(twice[0])}; give each its own")
    if tool_choice == "none":
        return None
    tools = [{name: value for name, value in each.items() if name != "cache_control"} for each in tools]
    is_parallel = parallel_tool_calls is not False
    if not named:
        return ToolUse(tools, "required" if tool_choice == "required" else "auto", None, is_parallel)
    name = _read(_NamedChoice, "tool_choice", tool_choice).function.name
    if name not in names:
        raise ConfigError(f"tool_choice: there is no function {short(name)} among the tools: {listed(names)}")
    return ToolUse(tools, "named", name, is_parallel)


def with_objects(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return messages whose calls have their arguments as objects, as chat templates expect them, not as JSON's text.

    Raises:
        ConfigError: the arguments of a call are no JSON object.
    """
    return [_with_objects(each, number) for number, each in enumerate(messages, start=1)]


def _with_objects(message: Mapping[str, Any], number: int) -> Mapping[str, Any]:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    found = []
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ConfigError(f"messages: message {number}: each of tool_calls must have a 'function' with a 'name'")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            with suppress(ValueError):
                arguments = json.loads(arguments or "{}")
        if not isinstance(arguments, Mapping):
            raise ConfigError(
                f"messages: message {number}: the arguments of {cut(function['name'])} must be a JSON object, not "
                f"{short(function.get('arguments'))}"
            )
        found.append({**call, "function": {**function, "arguments": arguments}})
    return {**message, "tool_calls": found}


def _read(kind: type[_Kind], what: str, value: object) -> _Kind:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{what} must be an object with a 'type', not {short(value)}")
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise ConfigError(f"{what}: {field_error(error, kind)}") from None


def _name(tool: Mapping[str, Any]) -> str:
    name: str = tool["function"]["name"]
    return name


def _schema(tool: Mapping[str, Any]) -> dict[str, Any]:
    parameters = tool["function"].get("parameters") or {"properties": {}, "additionalProperties": False}
    return {"type": "object", **parameters}


def _call(tool: Mapping[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a call, and move its definitions to the others', where their references find them."""
    arguments = dict(_schema(tool))
    for name, definition in arguments.pop("$defs", {}).items():
        if definitions.setdefault(name, definition) != definition:
            raise ConfigError(f"tools: two functions define {short(name)} in $defs in different ways; rename one")
    return {
        "type": "object",
        "properties": {"name": {"const": _name(tool)}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
