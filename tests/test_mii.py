"""DeepSpeed-MII's API: the examples of its README run unchanged but for the import and the model."""

import asyncio
import json
import os
import pkgutil
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import commands
import httpx2 as httpx
import psutil
import pytest
import torch
from jobs_support import letters_model
from stand_in import SCRIPT
from transformers import AutoTokenizer

import zinfer.mii as mii
from zinfer import LLM, SamplingParams
from zinfer.errors import CheckpointError, ConfigError
from zinfer.requests.completion import Completion, CompletionDelta
from zinfer.requests.length_limits import LengthLimits
from zinfer.requests.mii_params import MIIParams
from zinfer.serve import mii_routes
from zinfer.serve.prompts import Encoded

PROMPTS = ["DeepSpeed is", "Seattle is"]
GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(letters_model(tmp_path_factory.mktemp("models") / "letters"))


@pytest.fixture(scope="module")
def alone(model: str) -> list[tuple[str, int, int, str]]:
    with LLM(model, device="cpu") as llm:
        found = llm.generate(PROMPTS, SamplingParams(max_new_tokens=12))
    return [(each.text, len(PROMPTS[at]), len(each.token_ids), each.finish_reason) for at, each in enumerate(found)]


def shown(responses: list[mii.Response]) -> list[tuple[str, int, int, str]]:
    return [(each.generated_text, each.prompt_length, each.generated_length, each.finish_reason) for each in responses]


def test_a_pipeline(model: str, alone: list[tuple[str, int, int, str]], capsys: pytest.CaptureFixture[str]) -> None:
    pipe = mii.pipeline(model, device="cpu")
    response = pipe(PROMPTS, **GREEDY)
    print(response)
    assert capsys.readouterr().out == f"[{alone[0][0]}, {alone[1][0]}]\n"
    assert shown(response) == alone
    (whole,) = pipe(PROMPTS[0], **GREEDY, return_full_text=True)
    assert whole.generated_text == PROMPTS[0] + alone[0][0]
    assert pipe([]) == []
    assert pipe(PROMPTS[0], max_length=20, ignore_eos=True)[0].generated_length == 8
    for keywords, words in (
        ({"max_tokens": 3}, "unknown field 'max_tokens'"),
        ({"max_length": 5}, "max_length is 5, but the prompt has 12 tokens"),
        ({"stream": True}, "stream: a pipeline returns whole texts"),
        ({"top_p": 2.0}, "top_p must be"),
    ):
        with pytest.raises(ConfigError, match=words):
            pipe(PROMPTS, **keywords)
    pipe.destroy()


def test_keywords_that_cannot_be_used(model: str) -> None:
    for keywords, words in (
        ({"tensor_paralel": 2}, "unknown keyword 'tensor_paralel'; did you mean 'tensor_parallel'"),
        ({"tensor_parallel": 0}, "tensor_parallel must be a whole number"),
        ({"quantization_mode": "wf6af16"}, "quantization_mode is not supported; state"),
        ({"config": {"zero_optimisation": {}}}, "zero_optimisation"),
    ):
        with pytest.raises(ConfigError, match=words):
            mii.pipeline(model, **keywords)
    with pytest.raises(ConfigError, match="model_name_or_path is missing"):
        mii.pipeline()
    with pytest.raises(ConfigError, match="deployment_name must be of letters"):
        mii.client("..")


def test_names_are_not_hidden_by_modules_of_the_same_names() -> None:
    for found in pkgutil.iter_modules(mii.__path__):
        assert found.name not in mii.__all__
    assert dir(mii) == sorted(mii.__all__)
    for name in mii.__all__:
        assert callable(getattr(mii, name)), name


def test_defaults_are_those_of_mii() -> None:
    params = MIIParams.read({})
    sampling = params.within(params.sampling, 24, LengthLimits())
    assert (sampling.temperature, sampling.top_p, sampling.max_new_tokens) == (1.0, 0.9, 1000)
    assert MIIParams.read({"do_sample": False, "stop": "a"}).sampling == SamplingParams(stop=("a",))


class Counting:
    """A tokenizer that notes the texts it encodes."""

    def __init__(self, model: str) -> None:
        self.inner, self.texts = AutoTokenizer.from_pretrained(model), list[str]()

    def __call__(self, text: Any, *args: Any, **kwargs: Any) -> Any:
        self.texts += [text] if isinstance(text, str) else text
        return self.inner(text, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def test_each_prompt_is_tokenized_once(model: str, alone: list[tuple[str, int, int, str]]) -> None:
    tokenizer = Counting(model)
    pipe = mii.pipeline(model, tokenizer=tokenizer, device="cpu")
    tokenizer.texts.clear()
    assert shown(pipe(PROMPTS, **GREEDY)) == alone
    assert tokenizer.texts == PROMPTS
    pipe.destroy()

    async def ask() -> mii.Response:
        async with mii.BatchingEngine(model, tokenizer=tokenizer, device="cpu") as engine:
            tokenizer.texts.clear()
            return await engine.generate(PROMPTS[0], **GREEDY)

    assert shown([asyncio.run(ask())]) == alone[:1]
    assert tokenizer.texts == PROMPTS[:1]


def test_a_batching_engine(model: str, alone: list[tuple[str, int, int, str]]) -> None:
    async def ask() -> list[mii.Response]:
        async with mii.BatchingEngine(model, max_batch_size=4, max_wait_ms=50, device="cpu") as engine:
            return await asyncio.gather(*(engine.generate(each, **GREEDY) for each in PROMPTS * 8))

    assert shown(asyncio.run(ask())) == alone * 8


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Of deployments; none of them outlives a test."""
    monkeypatch.setenv("ZINFER_MII", str(tmp_path / "mii"))
    if not torch.cuda.is_available():  # what is started is warm
        for name, value in commands.variables_of_others().items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "executable", str(SCRIPT))
    yield tmp_path / "mii"
    for process in psutil.process_iter(["cmdline"]):
        if str(tmp_path / "mii") in " ".join(process.info["cmdline"] or []):
            process.send_signal(signal.SIGKILL)


def test_a_deployment(model: str, alone: list[tuple[str, int, int, str]], folder: Path, unused_tcp_port: int) -> None:
    client = mii.serve(
        model,
        model_config={"replica_num": 1, "device": "cpu"},
        mii_config={"deployment_name": "letters-deployment", "restful_api_port": unused_tcp_port},
        enable_restful_api=True,
    )
    assert shown(client.generate(PROMPTS, **GREEDY)) == alone
    other = mii.client("letters-deployment")
    for told in (client.mii_config, other.mii_config):
        assert (told.deployment_name, told.enable_restful_api) == ("letters-deployment", True)
        assert (told.restful_api_host, told.restful_api_port) == ("localhost", unused_tcp_port)
        assert dict(told.model_conf) == {"model_name_or_path": model, "tensor_parallel": 1, "replica_num": 1}
    parts: list[mii.Response] = []
    other.generate(PROMPTS[0], streaming_fn=parts.extend, **GREEDY)
    assert "".join(each.generated_text for each in parts) == alone[0][0]
    assert shown(parts)[-1][2:] == alone[0][2:]
    assert {each.finish_reason for each in parts[:-1]} <= {"none"}  # all tokens may come in one part
    url = f"http://localhost:{unused_tcp_port}"
    body = {"prompts": PROMPTS, "max_length": 24, "do_sample": False}
    found = httpx.post(f"{url}/mii/letters-deployment", json=body).json()
    assert [each["generated_length"] for each in found] == [12, 14]
    assert all(each["generated_text"].startswith(text) for each, (text, *_) in zip(found, alone, strict=True))
    one = httpx.post(f"{url}/generate", json={"prompt": PROMPTS[0], "max_length": 24, "do_sample": False})
    assert one.json() == {"generated_text": alone[0][0]}
    for body, words in (({"prompt": PROMPTS[:2]}, "one text, not 2"), ({"prompt": "a", "stream": True}, "/mii/NAME")):
        refused = httpx.post(f"{url}/generate", json=body)
        assert refused.status_code == 400
        assert words in refused.json()["error"]["message"]
    for keywords, words in (({"max_length": 5}, "max_length is 5"), ({"beams": 2}, "unknown field 'beams'")):
        with pytest.raises(ConfigError, match=words):
            client.generate(PROMPTS, **keywords)
    with pytest.raises(ConfigError, match="a deployment 'letters-deployment' runs already"):
        mii.serve(model, deployment_name="letters-deployment", device="cpu")
    server = psutil.Process(client.deployment.pid)
    processes = [server, *server.children(recursive=True)]
    other.terminate_server()
    assert not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in processes)
    assert list(folder.iterdir()) == []
    with pytest.raises(ConfigError, match="no deployment 'letters-deployment' runs"):
        mii.client("letters-deployment")


def test_parts_of_a_stream_have_no_finish_reason_but_the_last() -> None:
    """They come one by one here, as a fast server's do."""

    class TwoTokens:
        @asynccontextmanager
        async def admitted(self, several: list[Encoded]) -> AsyncIterator[None]:
            yield

        async def complete(self, encoded: Encoded) -> AsyncIterator[CompletionDelta]:
            yield CompletionDelta(0, 0, "a", (1,))
            yield CompletionDelta(0, 0, "b", (2,), completion=Completion(0, 0, "ab", (1, 2), "length"))

    async def read() -> list[Any]:
        events = mii_routes._parts(cast(Any, TwoTokens()), Encoded([7, 8, 9], SamplingParams()))
        return [part async for event in events for part in json.loads(event.removeprefix(b"data: "))]

    assert [tuple(each.values()) for each in asyncio.run(read())] == [("a", 3, 1, "none"), ("b", 3, 2, "length")]


def test_an_interrupted_start_leaves_no_server(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\nexec sleep 600\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    started: list[psutil.Process] = []

    def interrupt() -> None:
        while not (found := list(folder.glob("*/deployment.json"))):
            time.sleep(0.01)
        started.append(psutil.Process(json.loads(found[0].read_text())["pid"]))
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        mii.serve(str(tmp_path), deployment_name="slow")
    thread.join()
    assert not started[0].is_running() or started[0].status() == psutil.STATUS_ZOMBIE
    assert list(folder.iterdir()) == []
    with pytest.raises(ConfigError, match="no deployment 'slow' runs"):
        mii.client("slow")


def test_a_deployment_that_does_not_start_says_why(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(RuntimeError, match=r"the deployment 'empty' did not start: .*an empty folder"):
        mii.serve(str(tmp_path / "empty"), device="cpu")
    with pytest.raises(CheckpointError, match="no such folder"):
        mii.serve(str(tmp_path / "nowhere"), device="cpu")


@pytest.fixture
def unused_tcp_port() -> int:
    import socket

    with socket.socket() as one:
        one.bind(("localhost", 0))
        port: int = one.getsockname()[1]
    return port
