"""A server as OpenAI's own client sees it."""

import asyncio
import json
import re
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest
import torch
from guide_blocks import GUIDE, ROOT, blocks_of
from jobs_support import letters_model
from prometheus_client.parser import text_string_to_metric_families
from serve_support import KEY, Server, serving
from transformers import AutoModelForCausalLM, AutoTokenizer

from zinfer import LLM, SamplingParams

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }}:<tool_call>{% endfor %}"
    "{% for message in messages %}{{ message['content'] }}{% endfor %}"
)
TOOLS: Any = [
    {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"enum": [1, 2]}}}}},
    {"type": "function", "function": {"name": "now"}},
]
PROMPTS = [f"{'ab' * (number % 7 + 1)}{chr(97 + number % 26)}" for number in range(40)]
HI: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return letters_model(tmp_path_factory.mktemp("models") / "letters", chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(model, tmp_path_factory.mktemp("server"), "--max-requests", "64", "--max-body", "1") as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return server.client()


@pytest.fixture(scope="module")
def alone(model: Path) -> dict[str, str]:
    """Each prompt's greedy text."""
    with LLM(str(model), device="cpu") as llm:
        return {each: llm.generate(each, max_new_tokens=12)[0].text for each in PROMPTS}


def test_the_times_to_expect_are_said_first(server: Server) -> None:
    assert re.search(r"requests of 103 tokens in and 25 out, 1 at once: .* 256 at once: .* a token\n", server.said)


def test_models_are_listed_by_their_names(client: openai.OpenAI) -> None:
    assert [each.id for each in client.models.list()] == ["letters"]
    assert client.models.retrieve("letters").owned_by == "zinfer"
    with pytest.raises(openai.NotFoundError, match="model 'other' does not exist here; use 'letters'"):
        client.completions.create(model="other", prompt="a")


def test_a_chat_goes_on_until_the_model_ends_it_or_there_is_no_room(client: openai.OpenAI, model: Path) -> None:
    ended = client.chat.completions.create(model="letters", messages=HI, temperature=0)
    endless = client.chat.completions.create(
        model="letters", messages=HI, temperature=0, extra_body={"ignore_eos": True}
    )
    with LLM(str(model), device="cpu") as llm:
        (own,) = llm.generate(HI, max_new_tokens=123)
    assert (ended.choices[0].message.content, ended.choices[0].finish_reason) == (own.text, own.finish_reason)
    assert own.finish_reason == "stop"
    assert endless.usage is not None
    assert (endless.usage.prompt_tokens, endless.usage.completion_tokens) == (5, 123)
    assert endless.choices[0].finish_reason == "length"


def test_a_stream_holds_the_same_text_and_the_usage(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "letters", "messages": HI, "temperature": 0, "max_tokens": 20}
    options["extra_body"] = {"ignore_eos": True}
    whole = client.chat.completions.create(**options)
    num_chunks = 0
    for _ in range(20):  # tokens that wait for a slow reader come together
        stream = client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
        *chunks, last = list(stream)
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(each.choices[0].delta.content or "" for each in chunks) == whole.choices[0].message.content
        assert [each.choices[0].finish_reason for each in chunks if each.choices[0].finish_reason] == ["length"]
        assert all(each.usage is None for each in chunks)
        assert (last.choices, last.usage) == ([], whole.usage)
        if (num_chunks := len(chunks)) > 10:
            break
    assert num_chunks > 10


def test_several_prompts_with_several_choices_each(client: openai.OpenAI, alone: dict[str, str]) -> None:
    several = client.completions.create(model="letters", prompt=PROMPTS[:5], temperature=0, max_tokens=12)
    assert [each.index for each in several.choices] == list(range(5))
    assert [each.text for each in several.choices] == [alone[each] for each in PROMPTS[:5]]
    options: dict[str, Any] = {"model": "letters", "prompt": PROMPTS[:2], "n": 3, "seed": 5, "max_tokens": 8}
    drawn = client.completions.create(**options)
    texts: dict[int, str] = dict.fromkeys(range(6), "")
    for chunk in client.completions.create(**options, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert [texts[number] for number in range(6)] == [each.text for each in drawn.choices]
    assert len(set(texts.values())) > 1


@pytest.mark.slow
@pytest.mark.parametrize("num_requests", [300, pytest.param(2000, marks=pytest.mark.slow)])
def test_requests_without_a_seed_are_drawn_by_the_models_probabilities(
    server: Server, model: Path, num_requests: int
) -> None:
    """The statistic of chi-square stays below its 99.9999 % point; a choice's own seed repeats it."""
    params = SamplingParams(max_new_tokens=1, logprobs=3)
    with LLM(str(model), device="cpu") as llm:
        (likely,) = llm.generate("abc", params)[0].logprobs or ()
    body: dict[str, Any] = {"prompt": "abc", "max_tokens": 1, "allowed_token_ids": likely.top_ids}
    expected = torch.tensor(likely.top).softmax(0) * num_requests
    counts: dict[str, int] = {}
    with server.http() as http:
        for number in range(num_requests):
            choice = http.post("/v1/completions", json=body).json()["choices"][0]
            counts[choice["text"]] = counts.get(choice["text"], 0) + 1
            if number < 20:
                again = http.post("/v1/completions", json={**body, "seed": choice["seed"]}).json()["choices"][0]
                assert again == choice
        chunks = list(http.post("/v1/completions", json={**body, "stream": True}).iter_lines())
    assert any('"seed": ' in line for line in chunks)
    tokenizer = AutoTokenizer.from_pretrained(model)
    found = torch.tensor([float(counts.pop(tokenizer.decode(each), 0)) for each in likely.top_ids])
    assert not counts
    assert ((found - expected) ** 2 / expected).sum() < 27.6


def test_parameters_and_logprobs_are_those_of_llm(client: openai.OpenAI, model: Path) -> None:
    options: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9, "seed": 3, "logit_bias": {"40": -100}}
    options |= {"presence_penalty": 0.5, "frequency_penalty": 0.25, "stop": ["zz"]}
    found = client.completions.create(model="letters", prompt="abc", max_tokens=9, logprobs=2, **options)
    chat = client.chat.completions.create(
        model="letters", messages=HI, max_tokens=9, logprobs=True, top_logprobs=2, extra_body={"top_k": 5}, **options
    )
    bias = {**options, "logit_bias": {40: -100.0}}
    with LLM(str(model), device="cpu") as llm:
        (own,) = llm.generate("abc", SamplingParams(max_new_tokens=9, logprobs=2, **bias))
        (own_chat,) = llm.generate(HI, SamplingParams(max_new_tokens=9, logprobs=2, top_k=5, **bias))
    assert found.choices[0].text == own.text
    assert found.choices[0].logprobs is not None
    assert own.logprobs is not None
    assert found.choices[0].logprobs.token_logprobs == pytest.approx([each.chosen for each in own.logprobs], abs=1e-4)
    assert chat.choices[0].message.content == own_chat.text
    shown = chat.choices[0].logprobs
    assert shown is not None
    assert shown.content is not None
    assert [len(each.top_logprobs) for each in shown.content] == [2] * len(own_chat.token_ids)


def test_answers_have_the_form_that_is_asked_for(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"size": {"enum": ["small", "large"]}}, "required": ["size"]}
    schema["additionalProperties"] = False
    form: Any = {"type": "json_schema", "json_schema": {"name": "size", "schema": schema}}
    options: dict[str, Any] = {"model": "letters", "messages": HI, "max_tokens": 80, "seed": 1}
    answer = client.chat.completions.create(**options, response_format=form)
    assert json.loads(answer.choices[0].message.content or "")["size"] in ("small", "large")
    chunks = client.chat.completions.create(
        **options, stream=True, extra_body={"structured_outputs": {"regex": "[0-9]{4}-[0-9]{2}"}}
    )
    text = "".join(each.choices[0].delta.content or "" for each in chunks)
    assert re.fullmatch("[0-9]{4}-[0-9]{2}", text)
    form["json_schema"]["schema"] = {"type": "nothing"}
    with pytest.raises(openai.BadRequestError, match="nothing"):
        client.chat.completions.create(**options, response_format=form)


def test_tools_are_called(client: openai.OpenAI) -> None:
    """By what the model writes, which a regular expression decides here, and by what `tool_choice` forces."""
    options: dict[str, Any] = {"model": "letters", "messages": HI, "tools": TOOLS, "seed": 1, "max_tokens": 90}
    written = r'Yes[.]<tool_call>\{"name": "add", "arguments": \{"a": [12]\}\}</tool_call>'
    options["extra_body"] = {"structured_outputs": {"regex": written}}
    answer = client.chat.completions.create(**options)
    choice = answer.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Yes.")
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert call.function.name == "add"
    assert json.loads(call.function.arguments)["a"] in (1, 2)
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    deltas = [each.choices[0].delta for each in chunks[:-1]]
    assert "".join(each.content or "" for each in deltas) == "Yes."
    (part,) = [part for each in deltas for part in each.tool_calls or ()]
    assert part.function is not None
    assert (part.index, part.function.name, part.function.arguments) == (0, "add", call.function.arguments)
    assert part.id != call.id
    assert chunks[-2].choices[0].finish_reason == "tool_calls"
    assert chunks[-1].usage == answer.usage
    del options["extra_body"]
    forced = client.chat.completions.create(**options, tool_choice="required", parallel_tool_calls=False)
    assert forced.choices[0].message.tool_calls is not None
    assert [each.function.name in ("add", "now") for each in forced.choices[0].message.tool_calls] == [True]
    assert forced.choices[0].message.content is None
    named = client.chat.completions.create(
        **options, tool_choice={"type": "function", "function": {"name": "now"}}, stream=True
    )
    parts = [part for each in named for part in each.choices[0].delta.tool_calls or ()]
    assert json.loads("".join(part.function.arguments for part in parts)) == {}
    assert [part.function.name for part in parts if part.function.name] == ["now"]
    with pytest.raises(openai.BadRequestError, match="there is no function 'x' among the tools: add, now"):
        client.chat.completions.create(**options, tool_choice={"type": "function", "function": {"name": "x"}})


def test_an_echo_begins_each_choice_with_its_prompt(client: openai.OpenAI, alone: dict[str, str]) -> None:
    first, second = PROMPTS[:2]
    options: dict[str, Any] = {"model": "letters", "prompt": [first, second], "temperature": 0, "max_tokens": 12}
    found = client.completions.create(**options, echo=True)
    assert [each.text for each in found.choices] == [first + alone[first], second + alone[second]]
    texts = ["", ""]
    for chunk in client.completions.create(**options, echo=True, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [each.text for each in found.choices]


def test_an_echo_has_no_logprobs_unless_they_are_asked_for(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "letters", "prompt": "ab", "echo": True, "temperature": 0}
    for most in ({"max_tokens": 0}, {"max_tokens": 2}, {"extra_body": {"max_completion_tokens": 0}}):
        whole = client.completions.create(**options, **most)
        chunks = list(client.completions.create(**options, **most, stream=True))
        assert "".join(each.choices[0].text for each in chunks) == whole.choices[0].text
        assert whole.choices[0].text.startswith("ab")
        assert [each.choices[0].logprobs for each in (whole, *chunks)] == [None] * (len(chunks) + 1)


def test_prompts_are_scored(client: openai.OpenAI, server: Server, model: Path) -> None:
    """As evaluation harnesses ask, by text and by tokens, whole and streamed, with and without new tokens."""
    reference = AutoModelForCausalLM.from_pretrained(model).eval()
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = tokenizer(PROMPTS[6]).input_ids
    with torch.no_grad():
        wanted = reference(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    chosen = [float(row[token_id]) for row, token_id in zip(wanted, ids[1:], strict=False)]
    options: dict[str, Any] = {"model": "letters", "temperature": 0, "echo": True, "logprobs": 1}
    found = client.completions.create(prompt=[PROMPTS[6], PROMPTS[3]], max_tokens=1, **options)
    by_tokens = client.completions.create(prompt=ids, max_tokens=0, **options)
    *chunks, last = client.completions.create(prompt=ids, max_tokens=3, stream=True, **options)
    for shown, num_new in ((found.choices[0], 1), (by_tokens.choices[0], 0), (chunks[0].choices[0], 0)):
        assert shown.text.startswith(PROMPTS[6])
        assert shown.logprobs is not None
        own = shown.logprobs
        assert own.token_logprobs is not None
        assert own.top_logprobs is not None
        assert "".join(own.tokens or ()) == shown.text
        assert own.text_offset == list(range(len(ids) + num_new))
        first, *scores = own.token_logprobs[: len(ids)]
        assert (first, own.top_logprobs[0]) == (None, None)
        assert scores == pytest.approx(chosen, abs=1e-4)
        most = [float(row.max()) for row in wanted[:-1]]
        assert [max(each.values()) for each in own.top_logprobs[1 : len(ids)]] == pytest.approx(most, abs=1e-4)
    assert by_tokens.usage is not None
    assert by_tokens.usage.completion_tokens == 0
    offsets = [offset for each in (*chunks[1:], last) for offset in each.choices[0].logprobs.text_offset]
    assert offsets == [len(ids) + place for place in range(3)]  # tokens that came together share a chunk
    with server.http() as http:
        body = {"prompt": PROMPTS[6][:-2], "completions": [PROMPTS[6][-2:], "z"]}
        answer = http.post("/score", json=body).json()
        own_ids = http.post("/tokenize", json={"prompt": PROMPTS[6], "add_special_tokens": False}).json()
        info = http.get("/tokenizer_info").json()
        plain = http.post("/v1/completions", json={"prompt": ids, "prompt_logprobs": 2, "max_tokens": 1}).json()
        streamed = http.post("/v1/completions", json={"prompt": ids, "prompt_logprobs": 2, "stream": True})
        said = {"messages": [{"role": "user", "content": "ab"}], "prompt_logprobs": 0, "max_tokens": 1}
        chat = http.post("/v1/chat/completions", json=said).json()
        vectors = http.post("/v1/embeddings", json={"input": "a"})
        nothing = http.post("/score", json={"prompt": "a", "completions": ["b", ""]})
    assert answer["data"][0]["token_logprobs"] == pytest.approx(chosen[-2:], abs=1e-4)
    assert answer["data"][0]["logprob"] == pytest.approx(sum(chosen[-2:]), abs=1e-4)
    assert [each["num_tokens"] for each in answer["data"]] == [2, 1]
    assert [each["is_greedy"] for each in answer["data"]] == [False, False]
    assert (own_ids["tokens"], own_ids["max_model_len"]) == (ids, 128)
    assert info["chat_template"] == TEMPLATE
    first, *others = plain["choices"][0]["prompt_logprobs"]
    assert first is None
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert "prompt_logprobs" not in chat["choices"][0]
    assert [each[str(token_id)]["logprob"] for each, token_id in zip(others, ids[1:], strict=True)] == pytest.approx(
        chosen, abs=1e-4
    )
    assert streamed.status_code == 400
    assert "not in the chunks of a stream" in streamed.json()["error"]["message"]
    assert "this server completes; start `zinfer serve --task embed`" in vectors.json()["error"]["message"]
    assert "completion 2 adds no tokens" in nothing.json()["error"]["message"]


def test_forty_clients_at_once_get_the_texts_alone(server: Server, alone: dict[str, str]) -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
            calls = [
                client.completions.create(model="letters", prompt=each, temperature=0, max_tokens=12)
                for each in PROMPTS
            ]
            return [each.choices[0].text for each in await asyncio.gather(*calls)]

    assert asyncio.run(ask()) == [alone[each] for each in PROMPTS]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_leaves_ends_its_request(server: Server, streams: bool) -> None:
    body = {"prompt": ["ab"] * 40, "max_tokens": 120, "ignore_eos": True, "stream": streams}
    with server.http() as http:
        before = _passes(server)
        with pytest.raises(httpx.ReadTimeout):
            _read_all(http, body, timeout=0.3)
        deadline = time.monotonic() + 20
        while server.load()["sequences_under_way"]:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert _passes(server) < before + 118


def test_too_many_sequences_are_refused_with_429(client: openai.OpenAI) -> None:
    with pytest.raises(openai.RateLimitError, match="65 more than the limit of 64") as refused:
        client.completions.create(model="letters", prompt="a", n=65, max_tokens=1)
    assert refused.value.response.headers["retry-after"] == "1"


def test_a_request_may_have_a_priority(client: openai.OpenAI, alone: dict[str, str]) -> None:
    options: dict[str, Any] = {"model": "letters", "prompt": PROMPTS[0], "max_tokens": 12, "temperature": 0}
    answer = client.completions.create(**options, extra_body={"priority": -5})
    assert answer.choices[0].text == alone[PROMPTS[0]]
    with pytest.raises(openai.BadRequestError, match="priority must be"):
        client.completions.create(**options, extra_body={"priority": "high"})


def test_every_route_needs_the_key(server: Server) -> None:
    with httpx.Client(base_url=server.url) as http:
        for path in ("/v1/models", "/health", "/metrics", "/load", "/openapi.json", "/nothing"):
            assert http.get(path).status_code == 401
            assert http.get(path, headers={"Authorization": f"Bearer {KEY}x"}).status_code == 401
            assert http.get(path, headers={"Authorization": f"Basic {KEY}"}).status_code == 401
    with pytest.raises(openai.AuthenticationError, match="API key"):
        server.client(api_key="wrong").models.list()


def test_the_page_needs_no_key_and_lets_nothing_else_through(server: Server) -> None:
    with httpx.Client(base_url=server.url) as http:
        for path in ("/", "/docs", *(f"/page/{each.name}" for each in (ROOT / "zinfer" / "serve" / "page").iterdir())):
            answer = http.get(path)
            assert answer.status_code == 200
            assert "default-src 'none'" in answer.headers["content-security-policy"]
            assert answer.headers["content-type"].partition(";")[0] in ("text/html", "text/css", "text/javascript")
        assert http.post("/").status_code == 401
        assert http.get("/page/nothing.js").status_code == 404
        for path in ("/load", "/page/../load", "/page/%2e%2e/load", "/v1/models"):
            assert http.get(path).status_code in (401, 404)


BAD: list[tuple[bytes, int, str]] = [
    (b"", 400, "not JSON"),
    (b"{", 400, "not JSON"),
    (b"[1]", 400, "not a JSON object"),
    (b"\xff\xfe", 400, "not UTF-8"),
    (b'{"prompt": "a", "prompt": "b"}', 400, "given twice"),
    (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400, "not JSON"),
    (b'{"prompt": ' + b"[" * 90 + b"]" * 90 + b"}", 400, "nested"),
    (b'{"prompt": "a", "seed": 1' + b"0" * 5000 + b"}", 400, "JSON"),
    (b'{"prompt": "a", "temperature": NaN}', 400, "NaN"),
    (b'{"prompt": "\\ud800"}', 400, "surrogate"),
    (b'{"prompt": "a", "max_tokens": 1.5}', 400, "max_tokens must be a whole number"),
    (b'{"prompt": "a", "max_tokens": 100000}', 400, "128"),
    (b'{"prompt": [99999]}', 400, "token ids"),
    (b'{"prompt": []}', 400, "no tokens"),
    (b'{"prompt": ["a", 1]}', 400, "prompt"),
    (b'{"prompt": "a", "temperture": 1}', 400, "did you mean 'temperature'"),
    (b'{"prompt": "a", "suffix": "b"}', 400, "suffix is not supported"),
    (b'{"prompt": "a", "stream_options": {"include": true}}', 400, "stream_options"),
    (b'{"prompt": "a", "best_of": 2}', 400, "best_of"),
    (b'{"prompt": "' + b"a" * (1 << 20) + b'"}', 413, "send less"),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("body", "status", "words"), BAD, ids=[str(number) for number in range(len(BAD))])
def test_bodies_that_cannot_be_used(server: Server, body: bytes, status: int, words: str) -> None:
    with server.http() as http:
        for extra in (b"", b', "stream": true}'):
            sent = body[:-1] + extra if extra and body.endswith(b"}") else body
            answer = http.post("/v1/completions", content=sent)
            assert answer.status_code == status
            assert words in answer.json()["error"]["message"]


WHOLE = "a whole number of at least 1"
NOTHING: Any = {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}
FORCED: Any = {
    "tools": [{"type": "function", "function": {"name": "f", "parameters": NOTHING["json_schema"]["schema"]}}],
    "tool_choice": "required",
}
NAMED: list[tuple[str, dict[str, Any], str, str | None]] = [
    ("completions", {"max_tokens": 0}, f"max_tokens must be {WHOLE}, not 0; 0 needs echo", "max_tokens"),
    ("completions", {"max_completion_tokens": 1.5}, "max_completion_tokens must be", "max_completion_tokens"),
    ("completions", {"min_tokens": 17}, "min_tokens must be at most max_tokens, which is 16, not 17", "min_tokens"),
    ("completions", {"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens and max_completion_tokens mean", None),
    ("completions", {"stop_token_ids": [999]}, "stop_token_ids must be", "stop_token_ids"),
    ("completions", {"prompt": [999]}, "token ids are", "prompt"),
    ("completions", {"prompt": ["a"] * 2049}, "the prompts of one call are at most 2048, not 2049", "prompt"),
    ("completions", {"stream_options": {"usage": True}}, "unknown field 'stream_options.usage'", "stream_options"),
    ("completions", {"response_format": NOTHING}, "response_format: the json cannot be used", "response_format"),
    ("completions", {"response_format": NOTHING, "echo": True}, "response_format: the json", "response_format"),
    ("chat/completions", {"max_tokens": 0}, "max_tokens must be a whole number", "max_tokens"),
    ("chat/completions", {"max_completion_tokens": 1000}, "the prompt's 5 tokens and 1000 new ones", "messages"),
    ("chat/completions", {"messages": []}, "messages must hold", "messages"),
    ("chat/completions", {"messages": [{"role": "user", "content": 5}]}, "messages: the content of", "messages"),
    ("chat/completions", {"messages": [{"role": "user", "content": None}]}, "messages: the content of", "messages"),
    ("chat/completions", {"temprature": 1}, "unknown field 'temprature'", "temprature"),
    ("chat/completions", {"response_format": NOTHING}, "response_format: the json cannot be used", "response_format"),
    ("chat/completions", FORCED, "tools: the json cannot be used", "tools"),
    ("chat/completions", {"structured_outputs": {"regex": "("}}, "structured_outputs: the regex", "structured_outputs"),
]  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("url", "body", "words", "field"), NAMED, ids=[str(number) for number in range(len(NAMED))])
def test_errors_name_what_the_client_sent(
    server: Server, url: str, body: dict[str, Any], words: str, field: str | None
) -> None:
    source = {"messages": HI} if url.startswith("chat") else {"prompt": "ab"}
    with server.http() as http:
        for stream in (False, True):
            answer = http.post(f"/v1/{url}", json={**source, **body, "stream": stream})
            error = answer.json()["error"]
            assert error["message"].startswith(words)
            assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", field)


def test_hints_of_clients_change_no_answer(server: Server) -> None:
    part = {"type": "text", "text": "ab"}
    with server.http() as http:
        plain, hinted = (
            http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": [each]}], **more})
            for each, more in (
                (part, {"seed": 1}),
                (
                    part | {"cache_control": {"type": "ephemeral"}},
                    {"seed": 1, "prompt_cache_key": "k", "unheard_of": 1},
                ),
            )
        )
    assert plain.status_code == hinted.status_code == 200
    assert plain.json()["choices"] == hinted.json()["choices"]


def test_tokens_are_counted_and_decoded(server: Server) -> None:
    with server.http() as http:
        counted = http.post("/tokenize", json={"prompt": "abc"}).json()
        assert counted["count"] == len(counted["tokens"]) == 3
        assert http.post("/detokenize", json={"tokens": counted["tokens"]}).json()["prompt"].replace(" ", "") == "abc"
        assert http.post("/tokenize", json={"messages": HI}).json()["count"] == 5
        long = http.post("/tokenize", json={"prompt": "abc" * 1000}).json()
        assert long["count"] == 3000 > long["max_model_len"], "whoever cuts a text asks for its tokens"
        assert http.post("/detokenize", json={"tokens": [10**6]}).status_code == 400


@pytest.mark.sampled(3)
@pytest.mark.parametrize("words", ['40+2="}], temperature', "tool_choice", "/score"])
def test_the_guides_client_gets_an_answer(server: Server, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    block = next(each for each in blocks_of(GUIDE / "serve.md") if each.comment == "served" and words in each.text)
    code = block.text.replace("http://127.0.0.1:8000", server.url).replace("secret", KEY)
    exec(compile(code.replace('model="model"', 'model="letters"'), "serve.md", "exec"), {"client": server.client()})
    assert capsys.readouterr().out.strip()


def test_metrics_have_vllms_names_and_count(server: Server, client: openai.OpenAI) -> None:
    before = _metrics(server)
    client.completions.create(model="letters", prompt="abc", max_tokens=3, n=2, extra_body={"ignore_eos": True})
    time.sleep(1.2)  # replicas report once a second
    after = _metrics(server)

    def grown(name: str, **labels: str) -> float:
        return sum(_values(after, name, labels)) - sum(_values(before, name, labels))

    assert [grown(f"vllm:{name}_tokens_total", engine="0") for name in ("prompt", "generation")] == [3, 6]
    assert grown("vllm:time_to_first_token_seconds_count") == 2
    assert grown("vllm:inter_token_latency_seconds_count") == 4
    assert grown("vllm:e2e_request_latency_seconds_count") == 1
    assert grown("vllm:request_success_total", finished_reason="length") == 2
    assert grown("vllm:request_generation_tokens_sum") == 6
    assert grown("zinfer:generated_tokens_total", replica="0") >= 6
    assert grown("zinfer:computed_tokens_total") >= 3
    passes = grown("zinfer:pass_seconds_count")
    assert passes >= 3
    assert passes == grown("vllm:iteration_tokens_total_bucket", le="+Inf")
    assert grown("zinfer:pass_seconds_sum") > 0
    assert _values(after, "vllm:num_requests_running", {}) == _values(after, "vllm:num_requests_waiting", {}) == [0]
    assert (
        _values(after, "zinfer:kv_pages", {"state": "all"})[0] > _values(after, "zinfer:kv_pages", {"state": "used"})[0]
    )
    assert _values(after, "zinfer:stall_seconds_total", {"cause": "link"}) == [0]


def test_load_tells_what_each_replica_does(server: Server) -> None:
    with server.http() as http:
        assert http.post("/v1/completions", json={"prompt": "ab", "max_tokens": 1}).status_code == 200
    found: Any = server.load()
    while not sum(found["replicas"][0]["engine"]["pass_tokens"]["counts"]):  # it reports each second
        time.sleep(0.1)
        found = server.load()
    assert found["sequences_under_way"] == 0
    (replica,) = found["replicas"]
    assert replica["is_ready"]
    assert replica["waiting_sequences"] == replica["background_sequences"] == replica["running_sequences"] == 0
    engine = replica["engine"]
    assert engine["blocks"]["DEVICE"] > 0
    assert engine["memory_bytes"]["device"] > 0
    assert sum(engine["pass_seconds"]["counts"]) == sum(engine["pass_tokens"]["counts"]) > 0
    with server.http() as http:
        assert (http.get("/health").json(), http.get("/ready").status_code) == ({"status": "ok"}, 200)


def test_the_dashboard_shows_metrics_that_there_are(server: Server) -> None:
    with server.http() as http:
        shown = set(re.findall(r"(?m)^((?:vllm|zinfer):\w+)[{ ]", http.get("/metrics").text))
    dashboard = json.loads((ROOT / "deploy" / "grafana.json").read_text())
    asked = " ".join(target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", []))
    named = set(re.findall(r"(?:vllm|zinfer):\w+", asked))
    of_batches = {"zinfer:batch_rows", "zinfer:unfinished_batches"}  # with --files
    assert named - shown == of_batches
    kinds = {re.sub("_(bucket|sum|count|created)$", "", each) for each in shown if not each.endswith("_created")}
    assert {each for each in kinds if not any(name.startswith(each) for name in named)} == set()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("options", [(), ("--chat",), ("--whole",)])
def test_the_load_test_counts_what_it_sends(server: Server, options: tuple[str, ...]) -> None:
    words = ["--url", f"{server.url}/v1", "--api-key", KEY, "--rate", "100", "--requests", "20", *options]
    script = ROOT / "benchmarks" / "serve_load.py"
    sizes = ["--prompt-len", "5", "--max-tokens", "4"]
    done = subprocess.run([sys.executable, script, *words, *sizes], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["requests"], found["errors"], found["tokens"]) == (20, 0, 80)
    assert 0 < found["first_token_ms"]["p50"] <= found["request_ms"]["p99"]
    assert (found["between_tokens_ms"] is None) == ("--whole" in options)
    broken = subprocess.run([sys.executable, script, *words, *sizes, "--api-key", "no"], capture_output=True, text=True)
    assert "401" in broken.stderr


def test_the_server_takes_as_many_connections_as_the_system_allows(server: Server) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits = Path(f"/proc/{server.process.pid}/limits").read_text()
    assert re.search(rf"Max open files +{most} +{most} ", limits)


def _metrics(server: Server) -> list[Any]:
    with server.http() as http:
        return list(text_string_to_metric_families(http.get("/metrics").text))


def _values(families: list[Any], name: str, labels: dict[str, str]) -> list[float]:
    """The values of the samples of this name that have these labels."""
    samples = (sample for family in families for sample in family.samples)
    found = [each.value for each in samples if each.name == name and labels.items() <= each.labels.items()]
    assert found, name
    return found


def _passes(server: Server) -> float:
    time.sleep(1.1)  # replicas report once a second
    return _values(_metrics(server), "zinfer:pass_seconds_count", {})[0]


def _read_all(http: httpx.Client, body: dict[str, Any], timeout: float) -> None:
    """Read an answer, and leave once this many seconds have gone by."""
    end = time.monotonic() + timeout
    with http.stream("POST", "/v1/completions", content=json.dumps(body), timeout=timeout) as answer:
        for _ in answer.iter_raw():
            if time.monotonic() > end:
                raise httpx.ReadTimeout("long enough")
