"""Chat templates are rendered as transformers does, and one that fails, grows or never ends costs its own chat only."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from jobs_support import letters_model, letters_tokenizer, read_rows, write_rows
from openai_support import asked, run

from zinfer import LLM, SamplingParams
from zinfer.errors import ConfigError
from zinfer.requests.chat_templates import ChatTemplates

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
