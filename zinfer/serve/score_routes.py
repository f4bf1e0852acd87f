"""`POST /score`: the log-probabilities of completions that are given, after one prompt."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import Annotated, Any, Final

from fastapi import APIRouter, Request, Response
from pydantic import Field

from zinfer.requests.client_names import OpenBody
from zinfer.requests.completion import Completion
from zinfer.requests.field_errors import MESSAGES, TOKEN_IDS
from zinfer.requests.openai_choice import usage
from zinfer.requests.prompt_encoder import PromptLike
from zinfer.requests.sampling_params import SamplingParams
from zinfer.serve.answers import in_pieces, json_response, size_of_answer
from zinfer.serve.body import beside_loop, described, read_call
from zinfer.serve.disconnect import unless_disconnected
from zinfer.serve.encoding_lanes import size_of
from zinfer.serve.errors import ApiError
from zinfer.serve.prompts import Encoded
from zinfer.serve.service import Service

_LEAST_LOGPROB: Final = -9999.0  # JSON has no infinity
_MAX_JOINED: Final = 1 << 24
_Messages = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
_TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)]


class _Score(OpenBody):
    model: str | None = None
    prompt: Annotated[str | _TokenIds | None, Field(description=f"a text or {TOKEN_IDS}")] = None
    messages: Annotated[_Messages | None, Field(description=MESSAGES)] = None
    completions: Annotated[
        list[str | _TokenIds],
        Field(min_length=1, fail_fast=True, description="a list of texts, or of lists of token ids, one at least"),
    ]


def score_routes(service: Service) -> APIRouter:
    """Return the route over a service."""
    router = APIRouter()

    @router.post("/score", openapi_extra=described(_Score))
    async def score(request: Request) -> Response:
        body = await read_call(request, _Score, partial(_checked, service))
        name = service.check_model(body.model)
        num_prompt, several = await _encode(service, body)
        found = await unless_disconnected(request, _scored(service, several))

        def answer() -> Response:
            data = [_result(index, *pair) for index, pair in enumerate(zip(several, found, strict=True))]
            own = usage(num_prompt + sum(each["num_tokens"] for each in data), 0)
            return json_response({"object": "list", "model": name, "data": in_pieces(data), "usage": own})

        return await beside_loop(sum(map(size_of_answer, found)), answer)

    return router


def _checked(service: Service, body: _Score) -> _Score:
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give one of 'prompt' and 'messages', and only one")
    number, most = len(body.completions), service.prompts.most
    if number > most:
        raise ApiError(400, f"completions of one call are at most {most}, not {number}", param="completions")
    if number * size_of(body.messages if body.prompt is None else body.prompt, _MAX_JOINED) > _MAX_JOINED:
        whole = f"the prompt is computed with each of the {number:,} completions; all of them together"
        raise ApiError(400, f"{whole} take {_MAX_JOINED:,} characters at most; send them in parts", param="completions")
    return body


async def _encode(service: Service, body: _Score) -> tuple[int, list[Encoded]]:
    """Return the number of the prompt's tokens, and each completion behind it.

    A text is encoded together with a prompt that is a text; its tokens are those from where the two begin to differ.
    """
    prompt: PromptLike | None = {"prompt_token_ids": body.prompt} if isinstance(body.prompt, list) else body.prompt
    prompt = body.messages if prompt is None else prompt
    assert prompt is not None
    plain = SamplingParams(max_new_tokens=0, prompt_logprobs=0)
    (before,) = await service.prompts.encode([prompt], plain)
    behind = [await _joined(service, prompt, before.prompt_ids, each) for each in body.completions]
    several = await service.prompts.encode(behind, plain)
    found = await beside_loop(
        len(several) * len(before.prompt_ids),
        lambda: [_from_difference(before, *pair) for pair in enumerate(several, start=1)],
    )
    return len(before.prompt_ids), found


async def _joined(
    service: Service, prompt: PromptLike, prompt_ids: list[int], completion: str | list[int]
) -> PromptLike:
    if isinstance(prompt, str) and isinstance(completion, str):
        return prompt + completion
    own = await service.prompts.plain_ids(completion) if isinstance(completion, str) else completion
    return {"prompt_token_ids": [*prompt_ids, *own]}


def _from_difference(before: Encoded, number: int, both: Encoded) -> Encoded:
    pairs = zip(before.prompt_ids, both.prompt_ids, strict=False)
    num_equal = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
    if not 0 < num_equal < len(both.prompt_ids):
        raise ApiError(400, f"completion {number} adds no tokens to the prompt, or changes its first one")
    return replace(both, params=replace(both.params, prompt_logprobs=1, prompt_logprobs_start=num_equal))


async def _scored(service: Service, several: Sequence[Encoded]) -> list[Completion]:
    async with service.admitted(several), asyncio.TaskGroup() as group:
        tasks = [group.create_task(service.completions(each)) for each in several]
    return [completion for task in tasks for completion in task.result()]


def _result(index: int, encoded: Encoded, completion: Completion) -> dict[str, Any]:
    scores = (completion.prompt_logprobs or ())[encoded.params.prompt_logprobs_start :]
    logprobs = [max(each.chosen, _LEAST_LOGPROB) for each in scores if each is not None]
    return {
        "index": index,
        "logprob": sum(logprobs),
        "num_tokens": len(logprobs),
        "is_greedy": all(each is not None and each.chosen >= each.top[0] for each in scores),
        "token_logprobs": logprobs,
    }
