"""The forms in which models write calls of tools, found by what their chat templates hold.

They are response templates of transformers (`transformers.utils.chat_parsing`), whose parser reads text as it comes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from zinfer.errors import ConfigError
from zinfer.requests.tools import ToolUse

_ANCHOR: Final = "\x00"  # transformers wants one; nothing is read of prompts
_JSON: Final[Mapping[str, Any]] = {
    "repeats": True,
    "content": "json",
    "content_args": {"allow_non_json": True},
}
_NAMED: Final[Mapping[str, Any]] = {"function": {"name": "{name}", "arguments": "{content}"}}


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes calls.

    Attributes:
        name: for messages.
        template: a response template.
        reads_prompt: whether it begins within the prompt, as the tokenizer's own may.
        short_ids: whether the chat template wants ids of nine letters and digits.
    """

    name: str
    template: Mapping[str, Any]
    reads_prompt: bool = False
    short_ids: bool = False


def _template(**fields: Mapping[str, Any]) -> dict[str, Any]:
    return {"start_anchor": _ANCHOR, "fields": {"content": {"content": "text"}, **fields}}


HERMES: Final = ToolFormat(
    "<tool_call>{JSON}</tool_call>",
    _template(tool_calls={"open_pattern": r"\s*<tool_call>", "close": "</tool_call>", **_JSON}),
)
XML: Final = ToolFormat(
    "<tool_call><function=NAME>",
    _template(
        tool_calls={
            "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"</function>\s*</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
            "transform": _NAMED,
        }
    ),
)
MISTRAL: Final = ToolFormat(
    "[TOOL_CALLS]",
    _template(
        tool_calls={"open_pattern": r"\s*\[TOOL_CALLS\]\s*(?=\[)", **_JSON},
        named_calls={
            "open_pattern": (
                r"\s*\[TOOL_CALLS\](?P<name>[^\[\]{}\s]+)(?:\[CALL_ID\][^\[\]{}\s]+)?\[ARGS\]"
                r"|\s*\[TOOL_CALLS\](?P<name>[^\[\]{}\s]+)(?=\{)"
            ),
            "close_pattern": r"(?=\[TOOL_CALLS\])",
            **_JSON,
            "transform": _NAMED,
        },
    ),
    short_ids=True,
)
LLAMA: Final = ToolFormat(
    "Llama's JSON",
    _template(
        tool_calls={
            "open_pattern": (r'\s*(?:<\|python_tag\|>\s*)?(?=\{\s*"(?:type"\s*:\s*"function"\s*,\s*")?name"\s*:)'),
            "close_pattern": r"\s*;\s*(?=\{)|<\|eot_id\|>|<\|eom_id\|>",
            **_JSON,
        }
    ),
)
KNOWN: Final = "<tool_call>, [TOOL_CALLS], Llama's JSON, and those that a tokenizer's response_template describes"


def tool_format_of(use: ToolUse, tokenizer: Any, chat_template: str) -> ToolFormat | None:
    """Return how a model writes calls; None: it is not known, and need not be.

    Raises:
        ConfigError: it has to be known.
    """
    found = find_tool_format(tokenizer, chat_template)
    if found is None and use.mode == "auto":
        raise ConfigError(
            f"tools: this model writes calls in a form that is not known here (known are {KNOWN}); leave them out, or "
            "let tool_choice be 'required' or name a function"
        )
    return found


def find_tool_format(tokenizer: Any, chat_template: str) -> ToolFormat | None:
    """Return the form in which a model writes calls; None: it is not known.

    Args:
        tokenizer: its own response template comes first.
        chat_template: the one for chats with tools.
    """
    own = getattr(tokenizer, "response_template", None)
    if own is not None:
        return ToolFormat("its response_template", own, reads_prompt=True)
    if "<function=" in chat_template:
        return XML
    if "<tool_call>" in chat_template:
        return HERMES
    if "[TOOL_CALLS]" in chat_template:
        return MISTRAL
    if '"parameters"' in chat_template and ("python_tag" in chat_template or "ipython" in chat_template):
        return LLAMA
    return None
