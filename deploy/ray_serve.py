"""Replicas of a model behind Ray Serve, each with the routes of `zinfer serve` but files and batches.

    pip install '.[ray,serve]'
    serve run deploy.ray_serve:build model=/models/llama replicas=2 gpus=1

`device`, `cpus` and `gpus` are of each replica; `config` is a DeepSpeed-style JSON file. Where ZINFER_API_KEY is set
for `serve run`, requests must give one of the keys in it, which spaces separate.
"""

import os
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from fastapi import FastAPI
from pydantic import BaseModel
from ray import serve

from zinfer.requests.prompt_encoder import find_tokenizer
from zinfer.serve.app import make_app
from zinfer.serve.replica import Replica
from zinfer.serve.service import Service, ServiceLimits


class Arguments(BaseModel):
    """What `serve run` takes as NAME=VALUE."""

    model: Path
    replicas: int = 2
    gpus: float = 0
    cpus: float = 1
    device: str = "auto"
    config: Path | None = None


def _app(arguments: Arguments, keys: Sequence[str]) -> FastAPI:
    """Return an application that loads the model once its replica starts."""
    limits = ServiceLimits(is_shared=len(keys) > 1)
    words = [sys.executable, "-m", "zinfer", "replica", "--model", str(arguments.model), "--device", arguments.device]
    words += ["--ranks", "1"] if arguments.config is None else ["--ranks", "1", "--config", str(arguments.config)]

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
        with TemporaryDirectory(prefix="zinfer-ray-") as folder:
            replicas = [Replica(0, words, Path(folder))]
            service = Service(replicas, find_tokenizer(arguments.model), [arguments.model.name], limits)
            try:
                await service.start()
                app.mount("/", make_app(service, keys=keys, origins=(), folder=None))
                yield
            finally:
                await service.close()

    return FastAPI(
        lifespan=lifespan, openapi_url=None
    )  # the schema is that of the mounted application, behind the keys


def build(arguments: Arguments) -> serve.Application:
    """Return the application that `serve run` deploys. Raises ValueError for a variable of keys that holds none."""
    given = os.environ.get("ZINFER_API_KEY")
    keys = (given or "").split()
    if given is not None and not keys:
        raise ValueError("ZINFER_API_KEY is empty, and would let everybody in; give a key, or leave it out")

    @serve.deployment(
        name="zinfer",
        num_replicas=arguments.replicas,
        max_ongoing_requests=4096,
        ray_actor_options={"num_gpus": arguments.gpus, "num_cpus": arguments.cpus},
    )
    @serve.ingress(lambda: _app(arguments, keys))
    class Zinfer:
        pass

    return Zinfer.bind()
