"""Calls of tools in the chunks of a stream."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from zinfer.requests.completion import CompletionDelta
from zinfer.requests.tool_parser import AnswerParser, reason_with_calls


class ToolChunks:
    """Reads the calls of all choices of one stream.

    Args:
        open_parser: makes a choice's parser.
    """

    def __init__(self, open_parser: Callable[[], AnswerParser]) -> None:
        self._parsers = defaultdict[int, AnswerParser](open_parser)
        self._calling: set[int] = set()

    def split(self, index: int, chunk: dict[str, Any], delta: CompletionDelta) -> Iterator[dict[str, Any]]:
        """Yield the chunks of choice ``index`` in place of one whose text was not read yet; perhaps none."""
        parser, is_last = self._parsers[index], delta.completion is not None
        parts = [*parser.feed(delta.text), *(parser.finish() if is_last else ())]
        if any("tool_calls" in part for part in parts):
            self._calling.add(index)
        if not parts and (is_last or chunk["logprobs"]):
            parts.append({})
        for place, part in enumerate(parts, start=1):
            whole = chunk if place == len(parts) else {**chunk, "logprobs": None, "finish_reason": None}
            reason = reason_with_calls(whole["finish_reason"], has_calls=index in self._calling)
            yield {**whole, "delta": part, "finish_reason": reason}
