"""Routes for those who operate a server, and for clients that count tokens."""

from typing import Annotated, Any, Final

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import Field

from zinfer import __version__
from zinfer.requests.client_names import OpenBody
from zinfer.requests.field_errors import MESSAGES, TOKEN_IDS
from zinfer.requests.prompt_encoder import PromptLike
from zinfer.serve.answers import json_response
from zinfer.serve.body import described, read_call, read_model
from zinfer.serve.encoding_lanes import size_of
from zinfer.serve.errors import ApiError
from zinfer.serve.replicas import describe
from zinfer.serve.service import Service

_MOST_COUNTED: Final = 1 << 20
"""Characters, or tokens, of one call that counts them: it may be much longer than what the model takes."""
_Messages = Annotated[list[dict[str, Any]], Field(fail_fast=True)]


class _Tokenize(OpenBody):
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[_Messages | None, Field(description=MESSAGES)] = None
    add_special_tokens: bool = True


class _Detokenize(OpenBody):
    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True, description=TOKEN_IDS)]


def operation_routes(service: Service) -> APIRouter:
    """Return the routes over a service."""
    router = APIRouter()

    @router.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @router.get("/ready")
    async def ready() -> JSONResponse:
        return JSONResponse({"is_ready": service.is_ready}, 200 if service.is_ready else 503)

    @router.get("/version")
    def version() -> dict[str, str]:
        return {"version": __version__}

    @router.get("/load")
    def load() -> dict[str, Any]:
        return {"sequences_under_way": service.metrics.num_under_way, "replicas": describe(service.replicas)}

    @router.get("/metrics")
    def metrics() -> Response:
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @router.post("/tokenize", openapi_extra=described(_Tokenize))
    async def tokenize(request: Request) -> Response:
        body, prompt = await read_call(request, _Tokenize, _with_prompt)
        service.check_model(body.model)
        if not body.add_special_tokens and body.prompt is not None:
            token_ids = await service.prompts.plain_ids(body.prompt)
        else:
            token_ids = await service.prompts.token_ids(prompt)
        sizes = {"count": len(token_ids), "max_model_len": service.prompts.most_tokens}
        return json_response({**sizes, "tokens": token_ids})

    @router.get("/tokenizer_info")
    def tokenizer_info() -> dict[str, Any]:
        return service.prompts.tokenizer_info()

    @router.post("/detokenize", openapi_extra=described(_Detokenize))
    async def detokenize(request: Request) -> dict[str, str]:
        body = await read_model(request, _Detokenize)
        service.check_model(body.model)
        _check_length(len(body.tokens), "tokens", "tokens")
        return {"prompt": await service.prompts.decode(body.tokens)}

    return router


def _with_prompt(body: _Tokenize) -> tuple[_Tokenize, PromptLike]:
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give one of 'prompt' and 'messages', and only one")
    prompt: PromptLike | None = body.prompt if body.prompt is not None else body.messages
    assert prompt is not None
    _check_length(size_of(prompt, _MOST_COUNTED), "messages" if body.prompt is None else "prompt", "characters")
    return body, prompt


def _check_length(length: int, field: str, what: str) -> None:
    if length > _MOST_COUNTED:
        message = f"{field} takes {_MOST_COUNTED:,} {what} at most; send them in parts"
        raise ApiError(400, message, param=field)
