"""Embeddings over HTTP as OpenAI's own client sees them: transformers' vectors, for an encoder and a decoder."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from family_models import family_model
from guide_blocks import GUIDE, blocks_of
from jobs_support import letters_model, letters_tokenizer
from serve_support import KEY, Server, serving
from torch import nn
from transformers import AutoModel

TEXTS = ["a", "hello you", "zinfer streams", "the quick brown fox jumps", "b", "again and again"]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "bert"
    family_model("bert", "BertModel").save_pretrained(folder)
    letters_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def server(encoder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(encoder, tmp_path_factory.mktemp("server"), "--task", "embed", "--pooling", "mean") as server:
        yield server


def vectors(folder: Path, texts: list[str], pooling: str) -> torch.Tensor:
    model = AutoModel.from_pretrained(folder).eval()
    found = []
    for text in texts:
        with torch.no_grad():
            hidden = model(input_ids=torch.tensor([letters_tokenizer()(text).input_ids])).last_hidden_state[0]
        found.append(hidden.mean(dim=0) if pooling == "mean" else hidden[-1])
    return nn.functional.normalize(torch.stack(found), dim=-1)


def test_vectors_are_those_of_each_text_alone(server: Server, encoder: Path) -> None:
    wanted = vectors(encoder, TEXTS, "mean")
    client = server.client()
    coded = client.embeddings.create(model="bert", input=TEXTS)  # the client asks for base64
    plain = client.embeddings.create(model="bert", input=TEXTS, encoding_format="float")
    for answer in (coded, plain):
        assert [each.index for each in answer.data] == list(range(len(TEXTS)))
        torch.testing.assert_close(torch.tensor([each.embedding for each in answer.data]), wanted, rtol=1e-4, atol=1e-5)
        assert answer.usage.prompt_tokens == sum(map(len, TEXTS))
    ids = letters_tokenizer()(TEXTS[1]).input_ids
    for single in (TEXTS[1], ids, [ids]):
        (one,) = client.embeddings.create(model="bert", input=single).data
        torch.testing.assert_close(torch.tensor(one.embedding), wanted[1], rtol=1e-4, atol=1e-5)


def test_the_guides_example(server: Server) -> None:
    block = next(each for each in blocks_of(GUIDE / "serve.md") if "embeddings.create" in each.text)
    found: dict[str, Any] = {"client": server.client()}
    exec(compile(block.text.replace("bge-large", "bert"), "serve.md", "exec"), found)
    assert len(found["vectors"].data) == 2


def test_many_clients_at_once(server: Server, encoder: Path) -> None:
    wanted = vectors(encoder, TEXTS, "mean")

    async def ask() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
            calls = [client.embeddings.create(model="bert", input=TEXTS[number % 6]) for number in range(60)]
            return [each.data[0].embedding for each in await asyncio.gather(*calls)]

    found = torch.tensor(asyncio.run(ask()))
    torch.testing.assert_close(found, wanted[torch.arange(60) % 6], rtol=1e-4, atol=1e-5)


def test_what_cannot_be_embedded(server: Server) -> None:
    client = server.client()
    cases: list[tuple[dict[str, Any], str]] = [
        ({"input": ["a"] * 2049}, "the prompts of one call are at most 2048, not 2049"),
        ({"input": "a" * 65}, "65 tokens are more than 64"),
        ({"input": [[1, 10**6]]}, "token ids are whole numbers from 0 to"),
        ({"input": []}, "must be a text, a list of token ids"),
        ({"input": "a", "dimensions": 8}, "dimensions is not supported"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format must be 'float' or 'base64'"),
    ]
    for body, words in cases:
        with pytest.raises(openai.BadRequestError, match=words) as caught:
            client.embeddings.create(**{"model": "bert", "encoding_format": "float", **body})
        assert caught.value.param == list(body)[-1]
    with pytest.raises(openai.BadRequestError, match="this server embeds"):
        client.completions.create(model="bert", prompt="a")
    with server.http() as http:
        assert http.get("/metrics").status_code == 200
        assert http.post("/tokenize", json={"prompt": "ab"}).json()["max_model_len"] == 64


@pytest.mark.slow
def test_a_decoder_with_its_last_token(tmp_path: Path) -> None:
    model = letters_model(tmp_path / "letters")
    with serving(model, tmp_path, "--task", "embed", "--pooling", "last") as server:
        answer = server.client().embeddings.create(model="letters", input=TEXTS)
    found = torch.tensor([each.embedding for each in answer.data])
    torch.testing.assert_close(found, vectors(model, TEXTS, "last"), rtol=1e-4, atol=1e-5)
