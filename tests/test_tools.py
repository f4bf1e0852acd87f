"""Calls of tools in what models write, however it is cut into pieces, and the forms that are forced upon an output."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jobs_support import letters_model, letters_tokenizer, write_rows

from zinfer.errors import ConfigError
from zinfer.jobs.job import run_job
from zinfer.requests.prompt_encoder import PromptEncoder
from zinfer.requests.sampling_params import SamplingParams
from zinfer.requests.tool_formats import HERMES, LLAMA, MISTRAL, XML, ToolFormat, find_tool_format
from zinfer.requests.tool_parser import merged, open_parser
from zinfer.requests.tools import ToolUse, read_tools

NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "object"}}}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": NUMBERS}},
    {"type": "function", "function": {"name": "now"}},
]
ADD = ("add", {"a": 1, "b": {"x": "}</tool>"}})
OWN = {
    "defaults": {"role": "assistant"},
    "start_anchor": "assistant:",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open": "<<",
            "close": ">>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"content": "text"},
    },
}
OWN_FORM = ToolFormat("own", OWN, reads_prompt=True)
CASES: list[tuple[ToolFormat, str, str | None, list[tuple[str, dict[str, Any]]]]] = [
    (
        HERMES,
        'So.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": {"x": "}</tool>"}}}\n</tool_call>\n'
        '<tool_call>{"name": "now", "arguments": {}}</tool_call>\n',
        "So.",
        [ADD, ("now", {})],
    ),
    (HERMES, "2 < 3 <tool", "2 < 3 <tool", []),
    (HERMES, '<tool_call>{"name": add}</tool_call> yes', '{"name": add} yes', []),
    (HERMES, '<tool_call>{"name": "now", "arguments": {}}', None, [("now", {})]),
    (MISTRAL, '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": {"x": "}</tool>"}}}]', None, [ADD]),
    (MISTRAL, '[TOOL_CALLS]add[ARGS]{"a": 2}[TOOL_CALLS]now{}', None, [("add", {"a": 2}), ("now", {})]),
    (LLAMA, '{"name": "add", "parameters": {"a": 1, "b": {"x": "}</tool>"}}}', None, [ADD]),
    (
        LLAMA,
        '<|python_tag|>{"type": "function", "name": "now", "parameters": {}}; {"name": "add", "parameters": {"a": 3}}',
        None,
        [("now", {}), ("add", {"a": 3})],
    ),
    (LLAMA, 'An object: {"value": 1}', 'An object: {"value": 1}', []),
    (
        XML,
        "<tool_call>\n<function=add>\n<parameter=a>\n7\n</parameter>\n</function>\n</tool_call>",
        None,
        [("add", {"a": 7})],
    ),
    (OWN_FORM, 'hm</think>Yes.<<{"name": "now", "arguments": {}}>>', "Yes.", [("now", {})]),
]


def pieces_of(text: str, places: list[int]) -> list[str]:
    cuts = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[begin:end] for begin, end in pairwise(cuts)]


def called(message: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    calls = [each["function"] for each in message.get("tool_calls", ())]
    return [(each["name"], json.loads(each["arguments"])) for each in calls]


@pytest.mark.sampled(2)
@given(places=st.lists(st.integers(0, 200), max_size=40))
@pytest.mark.parametrize(("form", "text", "content", "calls"), CASES)
def test_calls_are_found_in_any_pieces(
    form: ToolFormat, text: str, content: str | None, calls: list[tuple[str, dict[str, Any]]], places: list[int]
) -> None:
    parser = open_parser(ToolUse(TOOLS), form, "user:a assistant:<think>")
    deltas = [delta for piece in pieces_of(text, places) for delta in parser.feed(piece)] + parser.finish()
    message = merged(deltas)
    assert called(message) == calls
    assert message["content"] == content
    assert message.get("reasoning_content") == ("hm" if form.reads_prompt else None)
    ids = {each["id"] for each in message.get("tool_calls", ())}
    assert len(ids) == len(calls)
    assert all((len(each) == 9) == form.short_ids for each in ids)


def test_one_call_alone_and_no_special_tokens() -> None:
    use = ToolUse(TOOLS, is_parallel=False)
    parser = open_parser(use, HERMES, hidden=["<|x|>"])
    text = '<|x|>a<tool_call>{"name": "now", "arguments": {}}</tool_call>' * 2
    message = merged([*parser.feed(text), *parser.finish()])
    assert called(message) == [("now", {})]
    assert message["content"] == "aa"


def test_forced_calls() -> None:
    use = read_tools(TOOLS, {"type": "function", "function": {"name": "add"}}, None)
    assert use is not None
    assert use.structure is not None
    assert json.loads(str(use.structure.json)) == NUMBERS
    parser = open_parser(use, None)
    deltas = [*parser.feed('{"a"'), *parser.feed(": 1}"), *parser.finish()]
    assert called(merged(deltas)) == [("add", {"a": 1})]
    assert [each["tool_calls"][0]["function"]["arguments"] for each in deltas] == ["", '{"a"', ": 1}"]
    use = read_tools(TOOLS, "required", False)
    assert use is not None
    assert use.structure is not None
    schema = json.loads(str(use.structure.json))
    assert (schema["minItems"], schema["maxItems"], len(schema["items"]["anyOf"])) == (1, 1, 2)
    for text, calls in (('[{"name": "now", "arguments": {}}]', [("now", {})]), ('[{"na', [])):
        parser = open_parser(use, None)
        message = merged([*parser.feed(text), *parser.finish()])
        assert called(message) == calls
        assert message["content"] == (None if calls else text)


def test_definitions_of_schemas_are_found_by_their_references() -> None:
    def tool(name: str, kind: str) -> dict[str, Any]:
        schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"type": kind}}}
        return {"type": "function", "function": {"name": name, "parameters": schema}}

    use = read_tools([tool("f", "string"), tool("g", "string")], "required", None)
    assert use is not None
    assert use.structure is not None
    assert json.loads(str(use.structure.json))["$defs"] == {"A": {"type": "string"}}
    use = read_tools([tool("f", "string"), tool("g", "integer")], "required", None)
    assert use is not None
    with pytest.raises(ConfigError, match=r"two functions define 'A' in \$defs"):
        assert use.structure


@pytest.mark.parametrize(
    ("tools", "choice", "message"),
    [
        ("a", None, "tools must be a list of functions, not 'a'"),
        ([1], None, "tool 1 must be an object with a 'type', not 1"),
        ([{"type": "custom", "function": {"name": "a"}}], None, "tool 1: type must be 'function', not 'custom'"),
        ([*TOOLS, {"type": "function", "function": {}}], None, "tool 3: .*name"),
        ([*TOOLS, TOOLS[0]], None, "two functions have the name 'add'"),
        (TOOLS, "perhaps", "tool_choice must be 'none', 'auto', 'required' or"),
        (TOOLS, {"type": "function", "function": {"name": "x"}}, "no function 'x' among the tools: add, now"),
        (None, "required", "tool_choice needs tools"),
    ],
)
def test_tools_that_cannot_be_used(tools: object, choice: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_tools(tools, choice, None)


def test_no_tools() -> None:
    assert read_tools(None, "auto", None) is None
    assert read_tools([], None, None) is None
    assert read_tools(TOOLS, "none", True) is None


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{{ tools }} in <tool_call></tool_call>", HERMES),
        ("{{ tools }} <tool_call><function=name>", XML),
        ("{{ tools }} [TOOL_CALLS]", MISTRAL),
        ('{{ tools }} <|python_tag|> {"name": , "parameters": }', LLAMA),
        ("{{ tools }} somehow", None),
    ],
)
def test_forms_are_found_in_chat_templates(template: str, form: ToolFormat | None) -> None:
    assert find_tool_format(letters_tokenizer(), template) is form
    tokenizer = letters_tokenizer()
    tokenizer.response_template = OWN
    found = find_tool_format(tokenizer, template)
    assert found is not None
    assert found.template is OWN


def test_templates_get_tools_and_objects() -> None:
    template = (
        "{% for tool in tools %}{{ tool.function.name }};{% endfor %}"
        "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments.a }}!{% endfor %}{% endfor %}"
    )
    tokenizer = letters_tokenizer(chat_template=template)
    encoder = PromptEncoder(tokenizer, 300)
    try:
        call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 5}'}}
        chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
        token_ids, _ = encoder.encode(chat, SamplingParams(), tools=TOOLS)
        assert tokenizer.decode(token_ids) == "add;now;5!"
        call["function"]["arguments"] = "five"  # type: ignore[index]
        with pytest.raises(ConfigError, match="message 2: the arguments of add must be a JSON object, not 'five'"):
            encoder.encode(chat, SamplingParams())
        tokenizer.chat_template = "{{ messages }}"
        with pytest.raises(ConfigError, match="the model's chat template has no place for them"):
            encoder.encode([chat[0]], SamplingParams(), tools=TOOLS)
    finally:
        encoder.close()


@pytest.mark.slow
def test_rows_of_batches(tmp_path: Path) -> None:
    """The same bytes in every run, ids of calls too."""
    template = "{% for tool in tools or [] %}{{ tool.function.name }}<tool_call>{% endfor %}{{ messages[0].content }}"
    folder = letters_model(tmp_path / "model", chat_template=template)
    written = r'So[.]<tool_call>\{"name": "now", "arguments": \{\}\}</tool_call>'
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, "max_tokens": 90, "seed": 1, "n": 2}
    line = {"custom_id": "x", "method": "POST", "url": "/v1/chat/completions"}
    write_rows(tmp_path / "in.jsonl", [{**line, "body": {**body, "structured_outputs": {"regex": written}}}])
    for name in ("a", "b"):
        run_job(folder, tmp_path / "in.jsonl", tmp_path / name, device="cpu")
    rows = [json.loads((tmp_path / name).read_text())["response"]["body"]["choices"] for name in ("a", "b")]
    assert rows[0] == rows[1]
    ids = set()
    for choice in rows[0]:
        assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", "So.")
        assert called(choice["message"]) == [("now", {})]
        ids.add(choice["message"]["tool_calls"][0]["id"])
    assert len(ids) == 2
