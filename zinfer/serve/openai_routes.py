"""OpenAI's routes that complete prompts, and its list of models."""

from typing import Any, Final

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from zinfer.requests.openai_body import Body, ChatBody, CompletionBody
from zinfer.requests.openai_choice import Echo
from zinfer.requests.prompt_encoder import PromptLike, template_variables
from zinfer.serve.answers import Call
from zinfer.serve.body import described, read_model
from zinfer.serve.disconnect import event_stream, unless_disconnected
from zinfer.serve.errors import ApiError
from zinfer.serve.service import Service

_DEFAULT_NEW: Final = 16
"""OpenAI's default of `max_tokens` for `/v1/completions`; a chat may go on as long as there is room."""


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
        body = await read_model(request, ChatBody)
        name = service.check_model(body.model)
        with body.names.told():
            service.prompts.check_lists(body.model_extra or {})
            return await _answer(request, body, await _chat_call(service, body, name))

    @router.post("/v1/completions", openapi_extra=described(CompletionBody))
    async def completions(request: Request) -> Response:
        body = await read_model(request, CompletionBody)
        name = service.check_model(body.model)
        with body.names.told():
            service.prompts.check_lists(body.model_extra or {})
            return await _answer(request, body, await _completion_call(service, body, name))

    return router


async def _chat_call(service: Service, body: ChatBody, name: str) -> Call:
    variables = template_variables(body.chat_template_kwargs, body.reasoning_effort)
    params, use, open_parser = body.params(None), body.tool_use, None
    tools = None if use is None else use.tools
    (encoded,) = await service.prompts.encode([_messages(body)], params, variables, priority=body.priority, tools=tools)
    if use is not None:
        open_parser = await service.prompts.parser_of(use, encoded, keeps_special=body.keeps_special)
    return Call(service, [encoded], [None], name, body.names, True, _wants_usage(body), open_parser)


async def _completion_call(service: Service, body: CompletionBody, name: str) -> Call:
    params = body.params(None)
    several = await service.prompts.encode(body.prompts, params, default_new=_DEFAULT_NEW, priority=body.priority)
    echoes: list[Echo | None] = [None] * len(several)
    if body.echo:
        texts = await service.prompts.texts(body.prompts, several)
        echoes = [Echo(text, each.prompt_ids) for text, each in zip(texts, several, strict=True)]
    return Call(service, several, echoes, name, body.names, False, _wants_usage(body))


async def _answer(request: Request, body: Body, call: Call) -> Response:
    if not body.stream:
        return JSONResponse(await unless_disconnected(request, call.whole()))
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
