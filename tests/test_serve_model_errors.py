"""What the model does wrong is the server's error, 500, on every route; what a client does wrong is the client's."""

import json
from collections.abc import Iterator
from typing import Any, Final

import pytest
from jobs_support import letters_model, letters_tokenizer
from serve_support import Server, serving
from transformers import AutoModelForCausalLM

BROKEN: Final = "Q"
TEMPLATE: Final = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Of a model that makes no numbers of one letter."""
    folder = letters_model(tmp_path_factory.mktemp("models") / "letters", chat_template=TEMPLATE)
    model = AutoModelForCausalLM.from_pretrained(folder)
    (token,) = letters_tokenizer()(BROKEN).input_ids
    model.model.embed_tokens.weight.data[token] = float("nan")
    model.save_pretrained(folder)
    with serving(folder, tmp_path_factory.mktemp("server")) as server:
        yield server


def asked(prompt: str) -> list[tuple[str, dict[str, Any]]]:
    messages = [{"role": "user", "content": prompt}]
    return [
        ("/v1/completions", {"prompt": prompt}),
        ("/v1/completions", {"prompt": ["a", prompt]}),
        ("/v1/completions", {"prompt": prompt, "stream": True}),
        ("/v1/completions", {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 0}),
        ("/v1/chat/completions", {"messages": messages}),
        ("/v1/chat/completions", {"messages": messages, "stream": True}),
        ("/score", {"prompt": prompt, "completions": ["b"]}),
        ("/mii/letters", {"prompts": [prompt]}),
        ("/mii/letters", {"prompts": prompt, "stream": True}),
        ("/generate", {"prompt": prompt}),
    ]


def test_an_error_of_the_model_is_500(server: Server) -> None:
    with server.http() as http:
        for route, body in asked(f"a{BROKEN}b"):
            answer = http.post(route, json=body)
            shown = (route, body, answer.text)
            assert answer.status_code == 500, shown
            error = answer.json()["error"]
            assert error["type"] == "server_error", shown
            assert "logits are not finite numbers" in error["message"], shown
        assert http.post("/v1/completions", json={"prompt": "ab", "max_tokens": 1}).status_code == 200


def test_an_error_of_the_request_is_400(server: Server) -> None:
    with server.http() as http:
        for route, body in asked("a" * 200):
            answer = http.post(route, json=body)
            assert answer.status_code == 400, (route, json.dumps(body), answer.text)
            assert answer.json()["error"]["type"] == "invalid_request_error"
