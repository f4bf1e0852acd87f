"""OpenAI's `/v1/embeddings`."""

import asyncio
import base64
from typing import Annotated, Any, Final, Literal

import msgspec
import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field, WithJsonSchema, field_validator

from zinfer.requests.client_names import ClientNames, OpenBody
from zinfer.requests.openai_body import PROMPTS
from zinfer.requests.prompt_encoder import PromptLike
from zinfer.requests.sampling_params import SamplingParams
from zinfer.serve.body import beside_loop, described, read_model
from zinfer.serve.disconnect import unless_disconnected
from zinfer.serve.errors import ApiError
from zinfer.serve.prompts import Encoded
from zinfer.serve.service import Service

_NOTHING_NEW: Final = SamplingParams(max_new_tokens=0, prompt_logprobs=0)
_Format = Annotated[Literal["float", "base64"], Field(description="'float' or 'base64'")]


class _Embeddings(OpenBody):
    input: Annotated[Any, WithJsonSchema(PROMPTS)]
    model: str | None = None
    encoding_format: _Format | None = None
    dimensions: int | None = None
    user: Any = None
    truncate_prompt_tokens: None = None
    add_special_tokens: None = None
    prompt_name: str | None = None

    @field_validator("input")
    @classmethod
    def _check_input(cls, value: object) -> object:
        several = value if isinstance(value, list) and value and isinstance(value[0], str | list) else [value]
        if all(isinstance(each, str) or _is_tokens(each) for each in several):
            return value
        raise ValueError("must be a text, a list of token ids, or a list of such inputs")

    def inputs(self, prefix: str) -> list[PromptLike]:
        """Return each input: a text behind ``prefix``, or its token ids."""
        given = self.input
        several = given if isinstance(given, list) and isinstance(given[0], str | list) else [given]
        return [prefix + each if isinstance(each, str) else {"prompt_token_ids": each} for each in several]


_NAMES: Final = ClientNames(frozenset(_Embeddings.model_fields), prompt="input")


def embedding_routes(service: Service) -> APIRouter:
    """Return the route over a service."""
    router = APIRouter()

    @router.post("/v1/embeddings", openapi_extra=described(_Embeddings))
    async def embeddings(request: Request) -> Response:
        body = await read_model(request, _Embeddings)
        name = service.check_model(body.model)
        service.check_task(embeds=True)
        if body.dimensions is not None:
            raise ApiError(400, "dimensions is not supported; leave it out", param="dimensions")
        with _NAMES.told():
            inputs = body.inputs(service.prompts.embedding_prompt(body.prompt_name))
            several = await service.prompts.encode(inputs, _NOTHING_NEW)
        vectors = await unless_disconnected(request, _embedded(service, several))
        num_tokens = sum(len(each.prompt_ids) for each in several)
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        rest = {"object": "list", "model": name, "usage": usage}

        def answer() -> bytes:
            data = [
                {"object": "embedding", "index": index, "embedding": msgspec.Raw(_shown(vector, body.encoding_format))}
                for index, vector in enumerate(vectors)
            ]
            return msgspec.json.encode({**rest, "data": data})

        whole = await beside_loop(sum(map(len, vectors)), answer)
        return Response(whole, media_type="application/json")

    return router


async def _embedded(service: Service, several: list[Encoded]) -> list[bytes]:
    async with service.admitted(several), asyncio.TaskGroup() as group:
        tasks = [group.create_task(service.embed(each)) for each in several]
    return [task.result() for task in tasks]


def _shown(vector: bytes, form: str | None) -> bytes:
    """Return a vector as JSON: each of its own, because the encoder keeps all other threads waiting."""
    if form == "base64":
        return msgspec.json.encode(base64.b64encode(vector).decode())
    return msgspec.json.encode(np.frombuffer(vector, "<f4").tolist())


def _is_tokens(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(each) is int for each in value)
