"""Long texts and lists: refused before they cost much, and no reason for others to wait."""

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from jobs_support import letters_model
from serve_support import Server, serving

from zinfer.requests.length_limits import LengthLimits
from zinfer.requests.prompt_encoder import PromptEncoder
from zinfer.requests.sampling_params import SamplingParams
from zinfer.serve.messages import Ready
from zinfer.serve.prompts import Prompts

LONG_S = 0.5
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = letters_model(tmp_path_factory.mktemp("models") / "letters")
    with serving(model, tmp_path_factory.mktemp("server")) as server:
        yield server


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
    ("/score", {"prompt": "a", "completions": ["a"] * 2049}, "completions of one call are at most 2048", "completions"),
    ("/tokenize", {"prompt": "a" * ((1 << 20) + 1)}, "prompt takes 1,048,576 characters at most", "prompt"),
    ("/detokenize", {"tokens": [5] * ((1 << 20) + 1)}, "tokens takes 1,048,576 tokens at most", "tokens"),
]  # fmt: skip


@pytest.mark.parametrize(("url", "body", "words", "field"), TOO_LONG, ids=[str(num) for num in range(len(TOO_LONG))])
def test_what_is_too_long_is_refused(server: Server, url: str, body: dict[str, Any], words: str, field: str) -> None:
    with server.http() as http:
        answer = http.post(url, json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["message"].startswith(words)
    assert error["param"] == field
