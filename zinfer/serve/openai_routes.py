"""OpenAI's routes that complete prompts, and its list of models."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Generic, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import Response

from zinfer.requests.openai_body import Body, ChatBody, CompletionBody
from zinfer.requests.openai_choice import Echo
from zinfer.requests.prompt_encoder import PromptLike, template_variables
from zinfer.requests.sampling_params import SamplingParams
from zinfer.requests.tools import ToolUse
from zinfer.serve.answers import Call
from zinfer.serve.body import described, read_call
from zinfer.serve.disconnect import event_stream, unless_disconnected
from zinfer.serve.errors import ApiError
from zinfer.serve.service import Service

_DEFAULT_NEW: Final = 16
"""OpenAI's default of `max_tokens` for `/v1/completions`; a chat may go on as long as there is room."""
_AnyBody = TypeVar("_AnyBody", bound=Body)


def openai_routes(service: Service) -> APIRouter:
    """Return the routes over a service."""
    router = APIRouter()

    @router.get("/v1/models")
    def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(service, name) for name in service.names]}

    @router.get("/v1/models/{name:path}")
    def model(name: str) -> dict[str, Any]:
        return _model(service, service.check_model(name))

    @router.post("/v1/chat/completions", openapi_extra=described(ChatBody))
    async def chat(request: Request) -> Response:
        asked = await read_call(request, ChatBody, partial(_asked_chat, service))
        with asked.body.names.told():
            return await _answer(request, asked.body, await _chat_call(service, asked))

    @router.post("/v1/completions", openapi_extra=described(CompletionBody))
    async def completions(request: Request) -> Response:
        asked = await read_call(request, CompletionBody, partial(_asked_completions, service))
        with asked.body.names.told():
            return await _answer(request, asked.body, await _completion_call(service, asked))

    @router.api_route("/v1/responses", methods=["GET", "POST"], include_in_schema=False)
    @router.api_route("/v1/responses/{rest:path}", methods=["GET", "POST", "DELETE"], include_in_schema=False)
    async def responses(rest: str = "") -> None:
        remedy = "use /v1/chat/completions, which OpenAI's client calls by client.chat.completions.create"
        raise ApiError(501, f"/v1/responses is not supported; {remedy}", code="not_supported")

    return router


@dataclass(frozen=True)
class _Asked(Generic[_AnyBody]):
    """A body, the name of the model that answers it, and what was read in it."""

    body: _AnyBody
    model: str
    prompts: Sequence[PromptLike]
    params: SamplingParams
    tool_use: ToolUse | None = None


def _asked_chat(service: Service, body: ChatBody) -> _Asked[ChatBody]:
    name = service.check_model(body.model)
    with body.names.told():
        service.prompts.check_lists({**(body.model_extra or {}), "tools": body.tools})
        return _Asked(body, name, [_messages(body)], body.params(None), body.tool_use)


def _asked_completions(service: Service, body: CompletionBody) -> _Asked[CompletionBody]:
    name = service.check_model(body.model)
    with body.names.told():
        service.prompts.check_lists(body.model_extra or {})
        return _Asked(body, name, body.prompts, body.params(None))


async def _chat_call(service: Service, asked: _Asked[ChatBody]) -> Call:
    body, use, open_parser = asked.body, asked.tool_use, None
    (encoded,) = await service.prompts.encode(
        asked.prompts,
        asked.params,
        template_variables(body.chat_template_kwargs, body.reasoning_effort),
        priority=body.priority,
        tools=None if use is None else use.tools,
    )
    if use is not None:
        open_parser = await service.prompts.parser_of(use, encoded, keeps_special=body.keeps_special)
    return Call(service, [encoded], [None], asked.model, body.names, True, _wants_usage(body), open_parser)


async def _completion_call(service: Service, asked: _Asked[CompletionBody]) -> Call:
    body = asked.body
    several = await service.prompts.encode(
        asked.prompts, asked.params, default_new=_DEFAULT_NEW, priority=body.priority
    )
    echoes: list[Echo | None] = [None] * len(several)
    if body.echo:
        texts = await service.prompts.texts(asked.prompts, several)
        echoes = [Echo(text, each.prompt_ids) for text, each in zip(texts, several, strict=True)]
    return Call(service, several, echoes, asked.model, body.names, False, _wants_usage(body))


async def _answer(request: Request, body: Body, call: Call) -> Response:
    if not body.stream:
        return await unless_disconnected(request, call.whole())
    return await event_stream(request, call.events(), **{"Cache-Control": "no-cache"})


def _messages(body: ChatBody) -> PromptLike:
    messages = body.messages
    if not messages:
        raise ApiError(400, "messages must hold at least one message", param="messages")
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ApiError(400, f"messages: message {number} must be an object with a string 'role'", param="messages")
    return messages


def _wants_usage(body: Body) -> bool:
    return body.stream_options is not None and bool(body.stream_options.include_usage)


def _model(service: Service, name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": service.began, "owned_by": "zinfer"}
