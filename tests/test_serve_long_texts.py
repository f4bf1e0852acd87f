"""Long texts and lists: refused before they cost much, and no reason for others to wait."""

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from jobs_support import letters_model, letters_tokenizer
from serve_support import Server, serving

from zinfer.requests.client_names import ClientNames
from zinfer.requests.completion import Completion
from zinfer.requests.length_limits import LengthLimits
from zinfer.requests.logprobs import Logprobs
from zinfer.requests.openai_choice import OpenAIChoices
from zinfer.requests.prompt_encoder import PromptEncoder
from zinfer.requests.sampling_params import SamplingParams
from zinfer.serve.answers import Call
from zinfer.serve.messages import Ready
from zinfer.serve.prompts import Encoded, Prompts

LONG_S = 0.5
HI = [{"role": "user", "content": "hi"}]
TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    "{% for tool in tools or [] %}<tool_call>{{ tool['function']['name'] }}{% endfor %}"
)
MANY = 100_000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = letters_model(tmp_path_factory.mktemp("models") / "letters", chat_template=TEMPLATE)
    with serving(model, tmp_path_factory.mktemp("server"), "--files", "kept") as server:
        yield server


@pytest.mark.slow
def test_short_texts_do_not_wait_for_long_ones(server: Server) -> None:
    """The long ones take several times as long as all the short ones."""
    long = {"prompt": "1+" * (1 << 19)}
    took_s: list[float] = []

    def count() -> None:
        began_s = time.monotonic()
        with server.http() as http:
            assert http.post("/tokenize", json=long).json()["count"] == 1 << 20
        took_s.append(time.monotonic() - began_s)

    counting = [threading.Thread(target=count) for _ in range(2)]
    for each in counting:
        each.start()
    num_before = 0
    with server.http() as http:
        time.sleep(LONG_S)
        for _ in range(3):
            answer = http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 1})
            assert answer.status_code == 200
            num_before += len(took_s) < len(counting)
    for each in counting:
        each.join()
    assert num_before == 3


def test_only_one_prompt_of_few_tokens_is_checked_between_others_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many prompts of a token each, or a long one, take milliseconds, and a text has to be tokenized."""
    threads: list[threading.Thread] = []

    def encode(encoder: object, prompt: object, params: SamplingParams, *others: object) -> tuple[list[int], Any]:
        threads.append(threading.current_thread())
        return [5], params

    monkeypatch.setattr(PromptEncoder, "encode", encode)
    prompts, params = Prompts(None, 2048), SamplingParams(max_new_tokens=1)
    prompts.open(Ready(4096, LengthLimits(), 100))

    def is_here(*several: Any) -> bool:
        threads.clear()
        asyncio.run(prompts.encode(several, params))
        assert len(threads) == len(several)
        return threading.current_thread() in threads

    try:
        assert is_here({"prompt_token_ids": [5] * 2000})
        assert not is_here({"prompt_token_ids": [5] * 2100})
        assert not is_here({"prompt_token_ids": [5]}, {"prompt_token_ids": [5]})
        assert not is_here("5")
    finally:
        prompts.close()


@pytest.mark.parametrize(("n", "is_here"), [(1, True), (64, False)])
def test_only_short_answers_are_built_between_others_tokens(n: int, is_here: bool) -> None:
    threads = set[threading.Thread]()
    scored = Logprobs(-1.0, [40, 41, 42], [-1.0, -2.0, float("-inf")])

    class Choices(OpenAIChoices):
        def whole(self, *args: Any, **options: Any) -> dict[str, Any]:
            threads.add(threading.current_thread())
            return super().whole(*args, **options)

    class Answering:
        choices = Choices(letters_tokenizer())

        @asynccontextmanager
        async def admitted(self, several: object) -> AsyncIterator[None]:
            yield

        async def completions(self, encoded: Encoded) -> list[Completion]:
            return [Completion(0, number, "aaaa", (40,) * 4, "length", (scored,) * 4) for number in range(n)]

    service: Any = Answering()
    params = SamplingParams(n=n, temperature=1.0, logprobs=3, max_new_tokens=4)
    call = Call(service, [Encoded([40], params)], [None], "letters", ClientNames(frozenset()), is_chat=False)
    answer = json.loads(bytes(asyncio.run(call.whole()).body))
    assert (threading.current_thread() in threads) == is_here
    assert len(threads) == 1
    assert [each["index"] for each in answer["choices"]] == list(range(n))
    assert set(answer["choices"][0]["logprobs"]["top_logprobs"][0].values()) == {-1.0, -2.0, -9999.0}
    assert answer["usage"] == {"prompt_tokens": 1, "completion_tokens": 4 * n, "total_tokens": 1 + 4 * n}


TOO_LONG: list[tuple[str, dict[str, Any], str, str]] = [
    ("/v1/completions", {"prompt": "1+" * 3_500_000}, "the prompt's first 6,144 characters of 7,000,000", "prompt"),
    ("/v1/completions", {"prompt": [5] * 2_000_000}, "the prompt has 2000000 tokens", "prompt"),
    ("/v1/completions", {"prompt": "a", "bad_words": ["a"] * 200_000}, "bad_words takes 1,024 texts", "bad_words"),
    ("/v1/completions", {"prompt": "a", "bad_words": "a" * 99_999}, "bad_words takes 65,536 characters", "bad_words"),
    ("/v1/completions", {"prompt": "a", "stop": ["a"] * 257}, "stop takes 256 texts at most, not 257", "stop"),
    (
        "/v1/completions",
        {"prompt": "a", "allowed_token_ids": [5] * 2_000_000},
        "allowed_token_ids takes 131 token ids at most",
        "allowed_token_ids",
    ),
    (
        "/v1/chat/completions",
        {"messages": HI, "logit_bias": dict.fromkeys(map(str, range(200)), 1)},
        "logit_bias takes 131 token ids at most, which is the model's whole vocabulary, not 200",
        "logit_bias",
    ),
    ("/generate", {"prompt": "a", "stop": ["a"] * 257}, "stop takes 256 texts", "stop"),
    ("/v1/chat/completions", {"messages": HI, "tools": [{}] * 1025}, "tools takes 1,024 functions at most", "tools"),
    (
        "/score",
        {"prompt": "a" * (1 << 14), "completions": ["a"] * 1025},
        "the prompt is computed with each of the 1,025 completions; all of them together take 16,777,216 characters",
        "completions",
    ),
    ("/score", {"prompt": "a", "completions": ["a"] * 2049}, "completions of one call are at most 2048", "completions"),
    ("/tokenize", {"prompt": "a" * ((1 << 20) + 1)}, "prompt takes 1,048,576 characters at most", "prompt"),
    ("/detokenize", {"tokens": [5] * ((1 << 20) + 1)}, "tokens takes 1,048,576 tokens at most", "tokens"),
]  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("url", "body", "words", "field"), TOO_LONG, ids=[str(num) for num in range(len(TOO_LONG))])
def test_what_is_too_long_is_refused(server: Server, url: str, body: dict[str, Any], words: str, field: str) -> None:
    with server.http() as http:
        answer = http.post(url, json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["message"].startswith(words)
    assert error["param"] == field


def tool(number: int) -> dict[str, Any]:
    return {"type": "function", "function": {"name": f"f{number}"}}


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TEXT = {"type": "text", "text": "a"}
SCHEMA = {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(MANY)}}
CHATS: dict[str, dict[str, Any]] = {
    "messages": {"messages": HI * MANY},
    "parts": {"messages": [{"role": "user", "content": [TEXT] * MANY}]},
    "tool calls": {"messages": [*HI, {"role": "assistant", "tool_calls": [CALL] * MANY}]},
    "tools": {"messages": HI, "tools": [tool(number) for number in range(MANY)]},
    "allowed tools": {"messages": HI, "tools": [tool(number) for number in range(1024)], "tool_choice": "required"},
    "functions": {"messages": HI, "functions": [{"name": "f"}] * MANY},
    "schema": {"messages": HI, "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
    "modalities": {"messages": HI, "modalities": ["text"] * MANY},
    "metadata": {"messages": HI, "metadata": {str(number): "a" for number in range(MANY)}},
    "variables": {"messages": HI, "chat_template_kwargs": {f"v{number}": 1 for number in range(MANY)}},
    "unknown fields": {"messages": HI, **{f"field {number}": 1 for number in range(MANY)}},
}
COMPLETIONS: dict[str, dict[str, Any]] = {
    "texts": {"prompt": ["a"] * MANY},
    "token ids": {"prompt": [40] * MANY},
    "lists of token ids": {"prompt": [[40]] * MANY},
    "lists of nothing": {"prompt": [[]] * MANY},
    "stop": {"prompt": "a", "stop": ["a"] * MANY},
    "stop tokens": {"prompt": "a", "stop_token_ids": [40] * MANY},
    "biases": {"prompt": "a", "logit_bias": {str(number): 1 for number in range(MANY)}},
    "allowed": {"prompt": "a", "allowed_token_ids": [40] * MANY},
    "bad words": {"prompt": "a", "bad_words": ["a"] * MANY},
    "scored answers": {"prompt": "a", "n": 1024, "logprobs": 20, "max_tokens": 16, "ignore_eos": True},
    "choices": {"prompt": "a", "structured_outputs": {"choice": [f"a{number}" for number in range(MANY)]}},
}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "scored texts": ("/score", {"prompt": "a", "completions": ["b"] * MANY}),
    "scored tokens": ("/score", {"prompt": [40] * MANY, "completions": ["b"]}),
    "scored messages": ("/score", {"messages": HI * MANY, "completions": ["b"]}),
    "2,000 scores": ("/score", {"prompt": "a" * 100, "completions": ["b"] * 2000}),
    "counted messages": ("/tokenize", {"messages": HI * MANY}),
    "counted tokens": ("/detokenize", {"tokens": [40] * MANY}),
    "embedded texts": ("/v1/embeddings", {"input": ["a"] * MANY}),
    "embedded tokens": ("/v1/embeddings", {"input": [[40]] * MANY}),
    "mii": ("/mii/letters", {"prompts": ["a"] * MANY}),
    "mii's stop": ("/mii/letters", {"prompts": ["a"], "stop": ["a"] * MANY}),
    "a batch's metadata": (
        "/v1/batches",
        {
            "input_file_id": "file-1",
            "endpoint": "/v1/completions",
            "completion_window": "24h",
            "metadata": {str(number): "a" for number in range(MANY)},
        },
    ),
}
LISTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: ("/v1/chat/completions", {"max_tokens": 1, **body}) for name, body in CHATS.items()},
    **{name: ("/v1/completions", {"max_tokens": 1, **body}) for name, body in COMPLETIONS.items()},
    **OTHERS,
}
NOT_SLOW = ("tools", "tool calls", "unknown fields")
LONGEST_S = 5.0
"""For a machine that does many other things; here it is a fraction of a second."""


def longest_ping(server: Server, asking: threading.Thread) -> float:
    """The longest time that /health took while somebody asked."""
    found_s = [0.0]
    asking.start()
    with server.http() as http:
        while asking.is_alive():
            began_s = time.monotonic()
            assert http.get("/health").status_code == 200
            found_s.append(time.monotonic() - began_s)
            asking.join(0.1)
    return max(found_s)


@pytest.mark.sampled(33)
@pytest.mark.parametrize(
    "name", [name if name in NOT_SLOW else pytest.param(name, marks=pytest.mark.slow) for name in LISTS]
)
def test_health_answers_while_a_long_list_is_read(server: Server, name: str) -> None:
    url, body = LISTS[name]
    statuses: list[int] = []

    def ask() -> None:
        with server.http() as http:
            statuses.append(http.post(url, json=body).status_code)

    longest_s = longest_ping(server, threading.Thread(target=ask))
    print(f"{name}: {statuses}, {longest_s:.3f} s")
    assert statuses[0] in (200, 400)
    assert longest_s < LONGEST_S
