"""Reads calls of tools out of the text that a model writes, as it comes."""

import json
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import count
from typing import Any, Final, Protocol

from zinfer.requests.tool_formats import ToolFormat
from zinfer.requests.tools import ToolUse

_SHORT: Final = 9
_REASONING: Final = ("reasoning_content", "reasoning", "thinking")
Delta = dict[str, Any]
"""An increment of a message, as OpenAI's streams have it: ``content``, ``reasoning_content`` or ``tool_calls``."""


class AnswerParser(Protocol):
    """Makes deltas of an answer's text."""

    def feed(self, text: str) -> list[Delta]:
        """Add text; returns what is certain by now."""

    def finish(self) -> list[Delta]:
        """Return the rest."""


def open_parser(
    use: ToolUse,
    form: ToolFormat | None,
    prompt: str = "",
    hidden: Collection[str] = (),
    ids: Iterator[str] | None = None,
) -> AnswerParser:
    """Return the parser of an answer.

    Args:
        form: how the model writes calls by itself; needed unless the answer has to be calls.
        prompt: the text that the answer follows, if the form reads it.
        hidden: special tokens that are no content.
        ids: of the calls; None: random ones.
    """
    ids = random_ids() if ids is None else ids
    ids = (each[:_SHORT] if form is not None and form.short_ids else f"call_{each}" for each in ids)
    if use.mode == "named":
        assert use.name is not None
        return _NamedParser(use.name, next(ids))
    if use.mode == "required":
        return _ListParser(ids)
    assert form is not None
    return _FormatParser(use, form, prompt, hidden, ids)


def random_ids() -> Iterator[str]:
    """Yield ids that nobody has used."""
    while True:
        yield secrets.token_hex(12)


def ids_of(name: str) -> Iterator[str]:
    """Yield the same ids for the same name."""
    return (blake2b(f"{name} {number}".encode(), digest_size=12).hexdigest() for number in count())


def with_calls(choice: dict[str, Any], parser: AnswerParser) -> dict[str, Any]:
    """Return a whole choice of a chat with the calls that its text holds."""
    content = choice["message"]["content"]
    found = merged([*parser.feed(content), *parser.finish()])
    reason = reason_with_calls(choice["finish_reason"], has_calls="tool_calls" in found)
    return {**choice, "message": choice["message"] | found, "finish_reason": reason}


def reason_with_calls(reason: str | None, *, has_calls: bool) -> str | None:
    """Return OpenAI's finish reason of an answer that may have calls."""
    return "tool_calls" if has_calls and reason == "stop" else reason


def merged(deltas: Sequence[Delta]) -> dict[str, Any]:
    """Return the fields of a message out of all its deltas; ``content`` is None if there are only calls."""
    message: dict[str, Any] = {"content": ""}
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        for name in ("content", "reasoning_content"):
            if name in delta:
                message[name] = message.get(name, "") + delta[name]
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(calls):
                own = {name: value for name, value in call.items() if name != "index"}
                calls.append(own | {"function": dict(call["function"])})
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    if calls:
        message["tool_calls"] = calls
        message["content"] = message["content"].strip() or None
    return message


class _NamedParser:
    """The whole text is the arguments of one function."""

    def __init__(self, name: str, call_id: str) -> None:
        self._first: Delta | None = _call(0, call_id, name, "")

    def feed(self, text: str) -> list[Delta]:
        more = [{"tool_calls": [{"index": 0, "function": {"arguments": text}}]}] if text else []
        first, self._first = self._first, None
        return [first, *more] if first is not None else more

    def finish(self) -> list[Delta]:
        return self.feed("")


class _ListParser:
    """The whole text is a list of calls; one that was cut short is content."""

    def __init__(self, ids: Iterator[str]) -> None:
        self._ids, self._text = ids, ""

    def feed(self, text: str) -> list[Delta]:
        self._text += text
        return []

    def finish(self) -> list[Delta]:
        try:
            calls = json.loads(self._text)
        except ValueError:
            return [{"content": self._text}]
        pairs = [(each["name"], json.dumps(each["arguments"], ensure_ascii=False)) for each in calls]
        return [_call(index, next(self._ids), *pair) for index, pair in enumerate(pairs)]


class _FormatParser:
    """Calls stand between delimiters of the model's own; what cannot be read as calls is content."""

    def __init__(
        self, use: ToolUse, form: ToolFormat, prompt: str, hidden: Collection[str], ids: Iterator[str]
    ) -> None:
        from transformers.utils.chat_parsing import ResponseParser

        tools = [dict(each) for each in use.tools]
        self._parser = ResponseParser(dict(form.template), prefix=prompt if form.reads_prompt else "", tools=tools)
        self._most = None if use.is_parallel else 1
        self._hidden, self._ids = hidden, ids
        self._num_calls = 0
        self._unread = ""  # text of a region whose end is to come
        self._is_broken = False

    def feed(self, text: str) -> list[Delta]:
        if self._is_broken:
            return self._content(text)
        try:
            events = self._parser.feed(text)
        except ValueError:  # of a tokenizer's own template
            self._is_broken = True
            return self._content(self._unread + text)
        return [delta for event in events for delta in self._deltas(event)]

    def finish(self) -> list[Delta]:
        if self._is_broken:
            return []
        try:
            _, events = self._parser.finalize()
        except ValueError:
            return self._content(self._unread)
        return [delta for event in events for delta in self._deltas(event)]

    def _deltas(self, event: Mapping[str, Any]) -> list[Delta]:
        field, kind = event["field"], event["type"]
        if field == "content":
            return self._content(event["text"]) if kind == "region_chunk" else []
        if field in _REASONING:
            return [{"reasoning_content": event["text"]}] if kind == "region_chunk" else []
        if kind == "region_open":
            self._unread = ""
        elif kind == "region_chunk":
            self._unread += event["text"]
        elif kind == "region_close":
            unread, self._unread = self._unread, ""
            return self._calls(event["value"], unread)
        return []

    def _calls(self, value: object, text: str) -> list[Delta]:
        pairs = [_named_arguments(each) for each in (value if isinstance(value, list) else [value])]
        if None in pairs:
            return self._content(text)
        found = []
        for name, arguments in filter(None, pairs):
            if self._most is None or self._num_calls < self._most:
                found.append(_call(self._num_calls, next(self._ids), name, arguments))
                self._num_calls += 1
        return found

    def _content(self, text: str) -> list[Delta]:
        for token in self._hidden:
            text = text.replace(token, "")
        if not text or (self._num_calls and text.isspace()):
            return []
        return [{"content": text}]


def _named_arguments(value: object) -> tuple[str, str] | None:
    """Return a call's function and its arguments as JSON; None: it is no call."""
    call = value.get("function", value) if isinstance(value, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return None
    if not isinstance(arguments, Mapping):
        return None
    return call["name"], json.dumps(arguments, ensure_ascii=False)


def _call(index: int, call_id: str, name: str, arguments: str) -> Delta:
    function = {"name": name, "arguments": arguments}
    return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
