"""Chat templates are rendered as transformers does, and one that fails, grows or never ends costs its own chat only."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from jobs_support import BOS, CHAT_TEMPLATE, letters_model, letters_tokenizer, read_rows, write_rows
from openai_support import asked, run
from tokenizers.processors import TemplateProcessing

from zinfer import LLM, SamplingParams
from zinfer.errors import ConfigError
from zinfer.requests.chat_templates import ChatTemplates
from zinfer.requests.prompt_encoder import PromptEncoder

HI = [{"role": "user", "content": "hi"}]
FOR_EVER = "{{ 7 ** (7 ** 10) }}"
ODD = (
    "{{ bos_token }}{% for m in messages %}{%- if m.tool_calls is defined %}called{% endif %}\n"
    "{% generation %}{{ m.content | tojson }}{% endgeneration %}{% if loop.index == 2 %}{% break %}{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}reply:{% endif %}"
)


@pytest.fixture(scope="module")
def templates() -> Iterator[ChatTemplates]:
    with closing(ChatTemplates()) as made:
        yield made


def test_texts_are_those_of_transformers(templates: ChatTemplates) -> None:
    tokenizer = letters_tokenizer(chat_template=ODD)
    chat: list[dict[str, Any]] = [*HI, {"role": "assistant", "content": "ü😀 <|x|>", "tool_calls": None}, *HI]
    wanted = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert templates.render(tokenizer.get_chat_template(), chat, tokenizer.special_tokens_map) == wanted
    assert wanted.startswith("<s>")


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ 1 // 0 }}", "fails on them: ZeroDivisionError: integer division or modulo by zero"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "fails on them: OverflowError: Range too big"),
        ("{{ 'a' * 10 ** 10 }}", "fails on them: MemoryError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "fails on them: RecursionError"),
        ("{{ raise_exception('no such role') }}", "refuses them: no such role"),
        ("{{ 'abc' * 30000000 }}", "refuses them: they render to 90000000 characters, more than 67108864"),
    ],
)
def test_what_a_template_may_not(templates: ChatTemplates, template: str, message: str) -> None:
    with pytest.raises(ConfigError, match="messages: the chat template ") as caught:
        templates.render(template, HI, {})
    assert message in str(caught.value)
    assert templates.render("{{ messages[0].content }}", HI, {}) == "hi"


def test_a_template_that_never_ends_is_ended() -> None:
    with closing(ChatTemplates(most_cpu_s=1)) as templates:
        with pytest.raises(ConfigError, match="the chat template fails on them: it computes for more than 1 s"):
            templates.render(FOR_EVER, HI, {})
        assert templates.render("{{ messages[0].content }}", HI, {}) == "hi"


def test_ctrl_c_ends_a_chat_that_is_rendered() -> None:
    patient = ChatTemplates(most_cpu_s=600)
    with closing(patient):
        patient.render("{{ 1 }}", HI, {})
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            patient.render(FOR_EVER, HI, {})
        assert patient.render("{{ messages[0].content }}", HI, {}) == "hi"


def test_a_job_goes_on_behind_rows_whose_template_fails(tmp_path: Path) -> None:
    template = "{{ 6 // messages[0].content | int }}{{ 'a' * 10 ** messages[0].content | int }}"
    model = letters_model(tmp_path / "model", chat_template=template)
    chats = [{"messages": [{"role": "user", "content": each}]} for each in ("0", "1", "12", "1")]
    rows = [{"id": "own", **chats[0]}, *(asked(f"{n}", "chat/completions", **each) for n, each in enumerate(chats))]
    summary = run(model, write_rows(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl")
    assert (summary.num_done, summary.num_failed) == (2, 3)
    found = {row.get("custom_id", row["id"]): row for row in read_rows(tmp_path / "out.jsonl")}
    assert found["own"]["error"].startswith("line 1: messages: the chat template fails on them: ZeroDivisionError")
    statuses = [found[f"{number}"]["response"]["status_code"] for number in range(4)]
    assert statuses == [400, 200, 400, 200]


def test_an_llm_goes_on_behind_prompts_whose_template_fails(tmp_path: Path) -> None:
    model = letters_model(tmp_path / "model", chat_template="{{ 6 // messages[0].content | int }}")
    chats = [[{"role": "user", "content": each}] for each in ("0", "1")]
    with LLM(model, device="cpu", kv_cache_memory="1MB") as llm:
        broken, found = llm.generate(chats, SamplingParams(max_new_tokens=2))
    assert str(broken.error).startswith("messages: the chat template fails on them: ZeroDivisionError")
    assert found.error is None


BEGUN: list[dict[str, Any]] = [*HI, {"role": "assistant", "content": "so"}]
CALLED = [*HI, {"role": "assistant", "content": "so", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]
ANSWERED, CLOSED = "user:hi;assistant:so;reply:", "user:hi;assistant:so;"
CONTINUED = CLOSED[:-1]
TURNS: list[tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any], str]] = [
    (HI, {}, {}, "user:hi;reply:"),
    (BEGUN, {}, {}, CONTINUED),
    (CALLED, {}, {}, ANSWERED),
    (BEGUN, {"continue_final_message": True}, {}, CONTINUED),
    (BEGUN, {}, {"continue_final_message": True, "add_generation_prompt": False}, CONTINUED),
    (BEGUN, {"continue_final_message": False}, {}, ANSWERED),
    (BEGUN, {"add_generation_prompt": True}, {}, ANSWERED),
    (BEGUN, {}, {"add_generation_prompt": True}, ANSWERED),
    (BEGUN, {"add_generation_prompt": False}, {}, CLOSED),
    (HI, {"continue_final_message": True}, {}, "user:hi"),
    (HI, {"add_generation_prompt": False}, {}, "user:hi;"),
    (HI, {"add_special_tokens": True}, {}, "<s>user:hi;reply:"),
]


@pytest.fixture(scope="module")
def encoder() -> Iterator[PromptEncoder]:
    tokenizer = letters_tokenizer(chat_template=CHAT_TEMPLATE)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    with closing(PromptEncoder(tokenizer, 131)) as made:
        yield made


@pytest.mark.parametrize(("chat", "fields", "variables", "text"), TURNS)
def test_a_last_message_of_the_assistant_is_continued(
    encoder: PromptEncoder, chat: list[dict[str, Any]], fields: dict[str, Any], variables: dict[str, Any], text: str
) -> None:
    ids, _ = encoder.encode(chat, SamplingParams(**fields), variables)
    assert encoder.tokenizer.decode(ids) == text


@pytest.mark.parametrize(
    ("fields", "variables", "words"),
    [
        ({"add_generation_prompt": True}, {"continue_final_message": True}, "are both true; give one of them"),
        (
            {"continue_final_message": False},
            {"continue_final_message": True},
            "is False, and True in chat_template_kwa",
        ),
        ({}, {"add_generation_prompt": 1}, "add_generation_prompt must be true or false, not 1"),
    ],
)
def test_what_contradicts_itself_is_refused(
    encoder: PromptEncoder, fields: dict[str, Any], variables: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        encoder.encode(BEGUN, SamplingParams(**fields), variables)
    with pytest.raises(ConfigError, match="continue_final_message and add_generation_prompt are both true"):
        SamplingParams(continue_final_message=True, add_generation_prompt=True)
    with pytest.raises(ConfigError, match="add_generation_prompt is for the messages of a chat, and the prompt is a"):
        encoder.encode("hi", SamplingParams(add_generation_prompt=False))


def test_a_template_that_hides_the_last_message_says_what_to_state(encoder: PromptEncoder) -> None:
    encoder.tokenizer.chat_template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    try:
        with pytest.raises(ConfigError, match="State add_generation_prompt as true to begin a new message instead"):
            encoder.encode(BEGUN, SamplingParams())
    finally:
        encoder.tokenizer.chat_template = CHAT_TEMPLATE


@pytest.mark.parametrize(
    ("text", "adds", "wanted"),
    [
        ("ab", None, "<s>ab"),
        ("<s>ab", None, "<s>ab"),
        ("<s><s>ab", None, "<s><s>ab"),
        ("<s>ab", True, "<s><s>ab"),
        ("<s>ab", False, "<s>ab"),
        ("ab", False, "ab"),
        ("", None, "<s>"),
    ],
)
def test_a_text_that_begins_with_bos_gets_no_second_one(
    encoder: PromptEncoder, text: str, adds: bool | None, wanted: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One by one and together; it is said once."""
    encoder._says_bos = True
    params = SamplingParams(add_special_tokens=adds)
    for _ in range(2):
        assert encoder.tokenizer.decode(encoder.encode(text, params)[0]) == wanted
    (together,) = encoder.encode_texts([(text, params)])
    if together != text:
        assert encoder.tokenizer.decode(together["prompt_token_ids"]) == wanted  # type: ignore[index, call-overload]
    said = [each.message for each in caplog.records if "begins with <s> already" in each.message]
    assert len(said) == (text.startswith("<s>") and adds is None)
