"""`zinfer chat`: talk with a model in a terminal."""

import asyncio
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from zinfer.cli.ending import Device, Interrupted, ending_signals, exit_on_error, importing
from zinfer.cli.options import (
    GenerationConfig,
    KVCache,
    MaxDeviceMemory,
    MaxNewTokens,
    MinP,
    NoDownload,
    OptionalModel,
    Seed,
    System,
    Temperature,
    TopK,
    TopP,
    Weights,
    begin_reading,
    model_folder,
    option_words,
)
from zinfer.errors import ConfigError


def chat(
    model: OptionalModel = None,
    url: Annotated[str | None, typer.Option(help="A server with OpenAI's interface instead.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="ZINFER_API_KEY", help="Key that the server wants.")] = None,
    served_model_name: Annotated[str | None, typer.Option(help="Model of the server; by default its first.")] = None,
    config: Annotated[Path | None, typer.Option(help="DeepSpeed-style JSON, for --model.")] = None,
    device: Annotated[Device | None, typer.Option(help="Where the layers compute, for --model.")] = None,
    weights: Weights = None,
    kv_cache: KVCache = None,
    max_device_memory: MaxDeviceMemory = None,
    generation_config: GenerationConfig = None,
    no_download: NoDownload = False,
    system: System = None,
    max_tokens: MaxNewTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    seed: Seed = None,
) -> None:
    """Talk with a model in a terminal: one in a folder, which is loaded for this chat, or one of a server.

    /help lists the commands of a chat, Ctrl-C ends an answer, Ctrl-D the chat. Without a terminal each line of stdin is
    a question.

    Exit codes: 0 ended, 2 unusable settings, 1 error.
    """
    with exit_on_error():
        if (model is None) == (url is None):
            raise ConfigError("give --model for a folder or --url for a server, one of them")
        memory = {"weights": weights, "kv_cache": kv_cache, "max_device_memory": max_device_memory}
        own = {"config": config, "device": device, **memory, "generation_config": generation_config}
        if url is not None and any(value is not None for value in own.values()):
            raise ConfigError(
                "--config, --device, --weights, --kv-cache, --max-device-memory and --generation-config are for "
                "--model; the server at --url has its own"
            )
        if model is not None and served_model_name is not None:
            raise ConfigError("--served-model-name is for --url; --model has one model")
        if model is not None:
            begin_reading(model_folder(model, config, no_download=no_download))
        _check_extra(needs_server=model is not None)
        with importing():
            from zinfer.chat.chat import talk
            from zinfer.chat.client import ChatClient
            from zinfer.chat.local_server import local_client
            from zinfer.chat.terminal import Terminal

        sampling = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k}
        sampling |= {"min_p": min_p, "seed": seed}
        options = {name: value for name, value in sampling.items() if value is not None}
        words = ["--model", model or "", *option_words(**own), *(["--no-download"] if no_download else [])]
        connection = local_client(words, options) if url is None else ChatClient(url, api_key, options)
        talking = talk(Terminal(), connection, model=served_model_name, system=system, signals=ending_signals())
        if (number := asyncio.run(talking)) is not None:
            raise Interrupted(number)


def _check_extra(*, needs_server: bool) -> None:
    names = ["prompt_toolkit", "httpx2", *(["fastapi", "uvicorn", "msgspec"] if needs_server else [])]
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise ConfigError(f"a chat needs {missing[0]}; run `pip install '.[chat]'`")
