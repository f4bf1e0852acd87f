"""`zinfer serve`: a server with OpenAI's interface; and the hidden command that its replicas run."""

import sys
from contextlib import ExitStack
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import typer

from zinfer.cli.ending import EXIT_STOPPED, Device, conclude, exit_on_error, importing, raise_on_signals, say
from zinfer.cli.options import (
    STATED_BY,
    Config,
    DeviceOption,
    DraftModel,
    GenerationConfig,
    KVCache,
    MaxDeviceMemory,
    Model,
    NoDownload,
    Weights,
    begin_reading,
    model_folder,
    option_words,
    reading_ahead,
    stated_keys,
)
from zinfer.errors import CheckpointError, ConfigError, SilentRankError
from zinfer.jobs.request import Pooling
from zinfer.serve.replica_process import started_replicas, wait_for_server
from zinfer.weights.folder import GGUF_SUFFIX, absolute, hub_name

_MIB = 1 << 20
_EXTRA = ("fastapi", "httptools", "msgspec", "multipart", "prometheus_client", "uvicorn", "uvloop")


class ServedTask(StrEnum):
    """What a server does with prompts."""

    GENERATE = "generate"
    EMBED = "embed"


def serve(
    model: Model,
    config: Config = None,
    device: DeviceOption = "auto",
    weights: Weights = None,
    kv_cache: KVCache = None,
    max_device_memory: MaxDeviceMemory = None,
    no_download: NoDownload = False,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any that is free.")] = 8000,
    uds: Annotated[Path | None, typer.Option(help="Unix socket to listen on instead.")] = None,
    api_key: Annotated[
        list[str] | None, typer.Option(envvar="ZINFER_API_KEY", help="Key that requests must give; repeatable.")
    ] = None,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="Name that requests use; repeatable. By default the folder's.")
    ] = None,
    task: Annotated[
        ServedTask, typer.Option(help="What the model does; embed serves /v1/embeddings.")
    ] = ServedTask.GENERATE,
    pooling: Annotated[Pooling, typer.Option(help="Pooling of token vectors for embed.")] = Pooling.AUTO,
    replicas: Annotated[int, typer.Option(min=1, help="Copies of the model, each in processes of its own.")] = 1,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Processes that share a replica; by default one per GPU, if there is one.")
    ] = None,
    max_requests: Annotated[int, typer.Option(min=1, help="Sequences under way at once; more get 429.")] = 4096,
    max_body: Annotated[int, typer.Option(min=1, help="MiB of a request's body; larger ones get 413.")] = 16,
    files: Annotated[Path | None, typer.Option(help="Folder for files and batches; without it there are none.")] = None,
    max_file: Annotated[int, typer.Option(min=1, help="MiB of an uploaded file; larger ones get 413.")] = 512,
    file_quota: Annotated[int, typer.Option(min=1, help="GiB of all files of one API key; more gets 413.")] = 64,
    ssl_certfile: Annotated[Path | None, typer.Option(help="PEM file of the certificate, for TLS.")] = None,
    ssl_keyfile: Annotated[Path | None, typer.Option(help="PEM file of its private key.")] = None,
    allowed_origin: Annotated[
        list[str] | None, typer.Option(help="Origin that browsers may call from; repeatable.")
    ] = None,
    root_path: Annotated[str, typer.Option(help="Path prefix that a proxy strips.")] = "",
    max_token_latency: Annotated[
        str | None, typer.Option(help="Most time between two tokens, such as 200ms; passes have fewer tokens for it.")
    ] = None,
    speculate: Annotated[
        Literal["auto", "ngram", "off"] | None,
        typer.Option(help="Guess next tokens from a request's own text; auto: where that costs no time."),
    ] = None,
    draft_model: DraftModel = None,
    generation_config: GenerationConfig = None,
    drain: Annotated[int, typer.Option(min=0, help="Seconds that requests may take after SIGTERM.")] = 60,
    arrive: Annotated[
        float,
        typer.Option(min=0.1, help="Seconds for a request to arrive and for its answer to be read, plus one a 4 KiB."),
    ] = 20.0,
    log_requests: Annotated[bool, typer.Option("--log-requests", help="Log each request, without its text.")] = False,
) -> None:
    """Serve a model over HTTP with OpenAI's interface: /v1/chat/completions, /v1/completions, /v1/models,
    with --files /v1/files and /v1/batches, and with --task embed only /v1/embeddings.

    Also /tokenize, /detokenize, /health, /ready, /version, /load and /metrics for Prometheus.

    Exit codes: 0 ended by SIGTERM or Ctrl-C, 2 unusable settings, 1 error.
    """
    with exit_on_error(), raise_on_signals(), ExitStack() as owned:
        _check_extra()
        folder = model_folder(model, config, no_download=no_download)
        _check_draft(draft_model, config, no_download)
        if (ssl_certfile is None) != (ssl_keyfile is None):
            raise ConfigError("--ssl-certfile and --ssl-keyfile go together; give both")
        if not all(map(str.strip, api_key or ())):
            raise ConfigError("--api-key is empty, and would let everybody in; give a key, or leave it out")
        stated = _stated(max_token_latency, speculate, draft_model)
        if task is ServedTask.EMBED:
            given = {"ranks": ranks, "files": files, "generation_config": generation_config, **stated}
            if unwanted := [name.replace("_", "-") for name, value in given.items() if value is not None]:
                raise ConfigError(f"--{unwanted[0]} is for servers that generate; leave it out beside --task embed")
        elif pooling is not Pooling.AUTO:
            raise ConfigError(f"--pooling {pooling} is for --task embed; leave it out, or add --task embed")
        words = [sys.executable, "-m", "zinfer", "replica", "--model", str(folder), "--device", device]
        words += ["--task", task, "--pooling", pooling]
        if ranks is None and replicas > 1:  # each would take all GPUs
            ranks = 1
        words += option_words(config=config, ranks=ranks, weights=weights, kv_cache=kv_cache)
        words += option_words(max_device_memory=max_device_memory, generation_config=generation_config)
        words += ["--no-download"] if no_download else []
        words += [word for key, value in stated.items() for word in (f"--{key.replace('_', '-')}", value)]
        processes = owned.enter_context(started_replicas(words, replicas))
        with importing(owned.close):
            from zinfer.config import resolve_settings
            from zinfer.requests.prompt_encoder import find_tokenizer
            from zinfer.serve.server import ServerOptions
            from zinfer.serve.server import serve as run_server
            from zinfer.serve.service import ServiceLimits
        keys = stated_keys(weights, kv_cache, max_device_memory, generation_config, no_download=no_download)
        resolve_settings(config, {"device": device, **stated, **keys}, swaps=True, options=STATED_BY)
        if log_requests:
            _log_requests()
        options = ServerOptions(
            served_model_name or [_name(model)],
            host,
            port,
            uds,
            ssl_certfile,
            ssl_keyfile,
            api_key or (),
            allowed_origin or (),
            root_path,
            max_body * _MIB,
            max_file * _MIB,
            files,
            drain,
            arrive,
            file_quota << 30,
        )
        limits = ServiceLimits(max_requests, is_shared=len(api_key or ()) > 1)
        run_server(processes, find_tokenizer(folder), options, limits, say)


def replica(
    model: Model,
    socket: Annotated[Path, typer.Option()],
    config: Annotated[Path | None, typer.Option()] = None,
    device: Annotated[Device, typer.Option()] = "auto",
    ranks: Annotated[int | None, typer.Option(min=1)] = None,
    task: Annotated[ServedTask, typer.Option()] = ServedTask.GENERATE,
    pooling: Annotated[Pooling, typer.Option()] = Pooling.AUTO,
    max_token_latency: Annotated[str | None, typer.Option()] = None,
    speculate: Annotated[str | None, typer.Option()] = None,
    generation_config: GenerationConfig = None,
    draft_model: DraftModel = None,
    weights: Weights = None,
    kv_cache: KVCache = None,
    max_device_memory: MaxDeviceMemory = None,
    no_download: NoDownload = False,
) -> None:
    """Compute for the server that listens on this socket."""
    with exit_on_error(lambda: "Finished requests were answered"), raise_on_signals():
        folder = model_folder(model, config, no_download=no_download)
        with reading_ahead(folder), importing():
            from zinfer.cli.launch import begin_rank, choose_num_ranks, launch

            begin_rank(ranks)
            from zinfer.config import resolve_settings
            from zinfer.serve.engine_process import compute, embed

            if not wait_for_server(socket):
                raise typer.Exit(EXIT_STOPPED)
        stated = _stated(max_token_latency, speculate, draft_model)
        keys = stated_keys(weights, kv_cache, max_device_memory, generation_config, no_download=no_download)
        keys["device"] = device
        settings = resolve_settings(config, {**keys, **stated}, swaps=True, options=STATED_BY)
        if task is ServedTask.EMBED:
            embed(str(socket), model, config, keys, pooling)
            return
        num_ranks = choose_num_ranks(ranks, settings.device, settings.parallel)
        if num_ranks > 1:
            launch(num_ranks, lambda: "Finished requests were answered")
        begin_reading(folder)

        def end(failure: SilentRankError) -> None:
            conclude(f"error: {failure}", EXIT_STOPPED, silent_rank=failure.rank)

        compute(str(socket), model, config, {**keys, **stated}, end)


def _stated(max_token_latency: str | None, speculate: str | None, draft_model: str | None) -> dict[str, str]:
    """Return the keys that are options too."""
    options = {"max_token_latency": max_token_latency, "speculate": speculate, "draft_model": draft_model}
    return {key: value for key, value in options.items() if value is not None}


def _check_draft(model: str | None, config: Path | None, no_download: bool) -> None:
    try:
        if model is not None:
            model_folder(model, config, no_download=no_download)
    except CheckpointError as error:
        raise CheckpointError(f"--draft-model: {error}") from error


def _name(model: str) -> str:
    """Return the name that requests use by default: the folder's, the GGUF file's, or the one on the hub."""
    name = hub_name(model)
    if absolute(name).is_file():
        return absolute(name).name.removesuffix(GGUF_SUFFIX)
    return absolute(name).resolve().name if absolute(name).is_dir() else name


def _check_extra() -> None:
    missing = [name for name in _EXTRA if find_spec(name) is None]
    if missing:
        raise ConfigError(f"a server needs {missing[0]}; run `pip install '.[serve]'`")


def _log_requests() -> None:
    import logging

    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    log = logging.getLogger("zinfer.serve")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
