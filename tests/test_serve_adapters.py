"""LangChain's and LlamaIndex's adapters for servers with OpenAI's interface, as their documentation uses them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs_support import letters_model
from serve_support import KEY, Server, serving

from zinfer import LLM

pytestmark = pytest.mark.slow
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
PROMPT = "hello"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return letters_model(tmp_path_factory.mktemp("models") / "letters", chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(model, tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture(scope="module")
def wanted(model: Path) -> str:
    """The greedy answer of eight tokens at most."""
    with LLM(str(model), device="cpu") as llm:
        return llm.generate([{"role": "user", "content": PROMPT}], max_new_tokens=8)[0].text


def test_langchain_gets_an_answer_and_a_stream(server: Server, wanted: str) -> None:
    adapters = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    chat = adapters.ChatOpenAI(
        base_url=f"{server.url}/v1", api_key=KEY, model="letters", temperature=0, max_tokens=8, max_retries=0
    )
    assert chat.invoke(PROMPT).content == wanted
    assert "".join(part.content for part in chat.stream(PROMPT)) == wanted


def test_llama_index_gets_an_answer_and_a_stream(server: Server, wanted: str) -> None:
    adapters = pytest.importorskip("llama_index.llms.openai_like", reason="llama-index-llms-openai-like is missing")
    llm = adapters.OpenAILike(
        api_base=f"{server.url}/v1",
        api_key=KEY,
        model="letters",
        is_chat_model=True,
        temperature=0,
        max_tokens=8,
        max_retries=0,
    )
    assert llm.complete(PROMPT).text == wanted
    assert "".join(part.delta or "" for part in llm.stream_complete(PROMPT)) == wanted
