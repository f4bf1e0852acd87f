"""Errors of OpenAI's bodies name what the client sent, and OpenAI's `param` is that field."""

from typing import Any

import pytest
from openai_support import HI

from zinfer.errors import ConfigError
from zinfer.jobs.openai_batch import read_request
from zinfer.requests.client_names import ClientNames, FieldError

_NAMES = ClientNames(frozenset({"n", "stop", "max_tokens"}), "input", {"max_new_tokens": "max_tokens"})
_WHOLE = "must be a whole number of at least 1, not"
_LARGE = {"enum": ["a" * (1 << 18)]}
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": _LARGE}}}}


@pytest.mark.parametrize(
    ("message", "told", "field"),
    [
        ("max_new_tokens must be 1", "max_tokens must be 1", "max_tokens"),
        ("at most max_new_tokens, not 5", "at most max_tokens, not 5", None),
        ("stop must be a text, not 'my max_new_tokens'", "stop must be a text, not 'my max_new_tokens'", "stop"),
        ("my_max_new_tokens is 1", "my_max_new_tokens is 1", None),
        ("n and stop are both given", "n and stop are both given", None),
        ("the prompt's max_new_tokens are", "the prompt's max_tokens are", "input"),
        ("token ids are whole numbers", "token ids are whole numbers", "input"),
        ("no text matches", "no text matches", None),
    ],
)
def test_messages_get_the_clients_names(message: str, told: str, field: str | None) -> None:
    with pytest.raises(FieldError) as caught, _NAMES.told():
        raise ConfigError(message)
    assert (str(caught.value), caught.value.field) == (told, field)
    with pytest.raises(FieldError) as again, ClientNames(frozenset(), by_own={"n": "no"}).told():
        raise caught.value
    assert again.value is caught.value


CHATS: list[tuple[dict[str, Any], str, str | None]] = [
    ({"max_tokens": 0}, f"max_tokens {_WHOLE} 0; 0 needs prompt_logprobs", "max_tokens"),
    ({"max_tokens": 1.5}, f"max_tokens {_WHOLE} 1.5", "max_tokens"),
    ({"max_completion_tokens": -1}, f"max_completion_tokens {_WHOLE} -1", "max_completion_tokens"),
    ({"max_tokens": None, "max_completion_tokens": 0}, f"max_completion_tokens {_WHOLE} 0", "max_completion_tokens"),
    ({"max_tokens": 4, "min_tokens": 5}, "min_tokens must be at most max_tokens, which is 4, not 5", "min_tokens"),
    ({"min_tokens": -1}, "min_tokens must be a whole number of at least 0, not -1", "min_tokens"),
    (
        {"max_tokens": 3, "max_completion_tokens": 4},
        "max_tokens and max_completion_tokens mean the same, but are 3 and 4; give one of them",
        None,
    ),
    ({"temperature": 3, "top_p": 2}, "top_p must be", "top_p"),
    ({"temprature": 3}, "unknown field 'temprature'; did you mean 'temperature'?", "temprature"),
    ({"guided_json": {}}, "unknown field 'guided_json'; give structured_outputs", "guided_json"),
    ({"max_new_tokens": 3}, "unknown field 'max_new_tokens'; did you mean 'max_tokens'?", "max_new_tokens"),
    ({"stop": ["my max_new_tokens", 3]}, "stop must be", "stop"),
    ({"audio": {}}, "audio is not supported", "audio"),
    ({f"hint {number}": 1 for number in range(65)}, "the body has 65 unknown fields", None),
    ({"stop_sequences": ["a"]}, "unknown field 'stop_sequences'; did you mean 'stop'?", "stop_sequences"),
    ({"echo": True}, "unknown field 'echo'; known fields: ", "echo"),
    ({"stream_options": {}}, "stream_options is not supported", "stream_options"),
    ({"logprobs": 1}, "logprobs must be true or false", "logprobs"),
    ({"top_logprobs": 1}, "top_logprobs needs logprobs", "top_logprobs"),
    ({"response_format": {"type": "x"}}, "response_format: type must be", "response_format"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": _LARGE}}},
        "response_format: json has 262,158 characters",
        "response_format",
    ),
    (
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        "response_format and structured_outputs both say what the output is",
        None,
    ),
    ({"structured_outputs": {"regex": 1}}, "structured_outputs: regex must be", "structured_outputs"),
    ({"tools": [1]}, "tools: tool 1 must be an object", "tools"),
    ({"tool_choice": "required"}, "tool_choice needs tools", "tool_choice"),
    ({"tools": [_TOOL], "tool_choice": "required"}, "tools: json has", "tools"),
    ({"messages": None}, "messages must be a list of messages", "messages"),
]
TEXTS: list[tuple[dict[str, Any], str, str | None]] = [
    ({"max_tokens": 0}, f"max_tokens {_WHOLE} 0; 0 needs echo", "max_tokens"),
    ({"max_completion_tokens": 0}, f"max_completion_tokens {_WHOLE} 0; 0 needs echo", "max_completion_tokens"),
    ({"echo": True, "logprobs": -1}, "logprobs must be a whole number of at least 0, not -1", "logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs must be a whole number of at least 0, not -1", "prompt_logprobs"),
    ({"best_of": 3}, "best_of must be equal to n", "best_of"),
    ({"suffix": "a"}, "suffix is not supported", "suffix"),
    ({"prompt": 1}, "prompt: must be one text", "prompt"),
]


@pytest.mark.parametrize(
    ("source", "body", "message", "field"),
    [("messages", *case) for case in CHATS] + [("prompt", *case) for case in TEXTS],
)
def test_bodies_that_cannot_be_used(source: str, body: dict[str, Any], message: str, field: str | None) -> None:
    url, prompt = ("/v1/chat/completions", HI) if source == "messages" else ("/v1/completions", "ab")
    line = {"custom_id": "a", "method": "POST", "url": url, "body": {source: prompt, **body}}
    with pytest.raises(FieldError) as caught:
        read_request(line, None)
    assert str(caught.value).startswith(message)
    assert caught.value.field == field


HINTS: dict[str, Any] = {
    **dict.fromkeys(("user", "metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_retention"), "a"),
    **{"safety_identifier": "a", "verbosity": "low", "prediction": {"type": "content"}, "modalities": ["text"]},
    **dict.fromkeys(("audio", "suffix", "web_search_options", "n", "stop", "best_of", "unheard_of"), None),
}


@pytest.mark.parametrize("source", ["messages", "prompt"])
def test_hints_change_nothing(source: str, caplog: pytest.LogCaptureFixture) -> None:
    url, prompt = ("/v1/chat/completions", HI) if source == "messages" else ("/v1/completions", "ab")
    line = {"custom_id": "a", "method": "POST", "url": url, "body": {source: prompt}}
    hints = HINTS if source == "messages" else {name: HINTS[name] for name in HINTS if name != "n"}
    found = read_request({**line, "body": {source: prompt, **hints}}, None)
    assert found["params"] == read_request(line, None)["params"]
    caplog.clear()
    for _ in range(2):
        read_request({**line, "body": {source: prompt, f"hint_for\n{source}": 1}}, None)
    assert [each.getMessage() for each in caplog.records] == [
        f"requests: the field hint_for\\n{source} is unknown and has no effect"
    ]
