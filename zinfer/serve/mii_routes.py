"""DeepSpeed-MII's REST API: `POST /mii/{deployment}`, and `POST /generate` for a single prompt."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any, Final

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from fastapi.sse import format_sse_event

from zinfer.requests.mii_params import MIIParams
from zinfer.serve.body import described, read_record
from zinfer.serve.disconnect import event_stream, unless_disconnected
from zinfer.serve.errors import ApiError
from zinfer.serve.prompts import Encoded
from zinfer.serve.service import Service

_TEXTS: Final = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]}


def mii_routes(service: Service) -> APIRouter:
    """Return the routes over a service."""
    router = APIRouter()

    @router.post("/mii/{deployment}", openapi_extra=described(MIIParams, prompts=_TEXTS))
    async def generate(deployment: str, request: Request) -> Response:
        service.check_model(deployment)
        prompts, params = await read_record(request, partial(_asked, service, "prompts"))
        several = await _encode(service, prompts, params)
        if not params.stream:
            return JSONResponse(await unless_disconnected(request, _whole(service, prompts, several, params)))
        if len(prompts) != 1:
            raise ApiError(400, f"stream takes one prompt, not {len(prompts)}", param="prompts")
        return await event_stream(request, _parts(service, several[0]))

    @router.post("/generate", openapi_extra=described(MIIParams, prompt={"type": "string"}))
    async def one(request: Request) -> Response:
        prompts, params = await read_record(request, partial(_asked, service, "prompt"))
        if len(prompts) != 1:
            remedy = "POST /mii/NAME takes several"
            raise ApiError(400, f"prompt takes one text, not {len(prompts)}; {remedy}", param="prompt")
        if params.stream:
            raise ApiError(400, "stream is not supported here; POST /mii/NAME streams", param="stream")
        several = await _encode(service, prompts, params)
        (found,) = await unless_disconnected(request, _whole(service, prompts, several, params))
        return JSONResponse({"generated_text": found["generated_text"]})

    return router


def _asked(service: Service, field: str, body: dict[str, Any]) -> tuple[list[str], MIIParams]:
    """Return the prompts of a body, which are in `field`, and its other fields."""
    prompts = _prompts(body.pop(field, None))
    service.prompts.check_lists(body)
    return prompts, MIIParams.read(body)


def _prompts(value: object) -> list[str]:
    prompts = [value] if isinstance(value, str) else value
    if not isinstance(prompts, list) or not prompts or not all(isinstance(each, str) for each in prompts):
        raise ApiError(400, "prompts must be a text, or a list of texts, one at least", param="prompts")
    return prompts


async def _encode(service: Service, prompts: list[str], params: MIIParams) -> list[Encoded]:
    sampling = replace(params.sampling, max_new_tokens=1)
    several = await service.prompts.encode(prompts, sampling)
    return [
        replace(each, params=params.within(each.params, len(each.prompt_ids), service.prompts.length_limits))
        for each in several
    ]


async def _whole(
    service: Service, prompts: list[str], several: list[Encoded], params: MIIParams
) -> list[dict[str, Any]]:
    async with service.admitted(several), asyncio.TaskGroup() as group:
        tasks = [group.create_task(service.completions(each)) for each in several]
    return [
        {
            "generated_text": prompt + completion.text if params.return_full_text else completion.text,
            "prompt_length": len(encoded.prompt_ids),
            "generated_length": len(completion.token_ids),
            "finish_reason": completion.finish_reason,
        }
        for prompt, encoded, task in zip(prompts, several, tasks, strict=True)
        for completion in task.result()
    ]


async def _parts(service: Service, encoded: Encoded) -> AsyncGenerator[bytes, None]:
    """Yield the events of a stream; an error after the first of them is an event too, one before is raised."""
    num_new, has_begun = 0, False
    try:
        async with service.admitted([encoded]), aclosing(service.complete(encoded)) as deltas:
            async for delta in deltas:
                num_new += len(delta.token_ids)
                reason = "none" if delta.completion is None else delta.completion.finish_reason
                part = {
                    "generated_text": delta.text,
                    "prompt_length": len(encoded.prompt_ids),
                    "generated_length": num_new,
                    "finish_reason": reason,
                }
                has_begun = True
                yield format_sse_event(data_str=json.dumps([part]))
    except Exception as error:
        if not has_begun:
            raise
        yield format_sse_event(data_str=json.dumps(ApiError.of(error).body))
