"""Errors of requests, as OpenAI's interface tells them."""

import errno
from collections.abc import Sequence
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from zinfer.errors import ConfigError
from zinfer.requests.client_names import FieldError
from zinfer.requests.field_errors import cut, must_be, name_of, short

_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_CLIENT_GONE: Final = 499  # in the log; nobody reads it
_TYPES: Final = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ReplicaGone(Exception):
    """The process that computes has ended, or has not loaded the model yet; the request may be sent again."""


class Lost(ReplicaGone):
    """A replica ended, or a pass of it failed, with requests under way, of which one may be the cause.

    Args:
        reason: what has happened.
        requests: as they were named to `Replica`.
        remedy: added to the message.
    """

    def __init__(self, reason: str, requests: Sequence[object], remedy: str = "it is started again") -> None:
        super().__init__(f"{reason}; {remedy}")
        self.reason, self.requests, self.is_noted = reason, requests, False


class RequestFailed(Exception):
    """A request cannot be computed, which is not the client's fault."""


class ClientGone(Exception):
    """The client has closed its connection; nobody reads an answer."""


class ApiError(Exception):
    """A request that gets no answer.

    Args:
        status: of the HTTP response.
        message: what is wrong, and the remedy.
        param: the field that is wrong.
        code: OpenAI's word for the error.
        retry_after_s: when to try again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}

    @classmethod
    def of(cls, error: Exception) -> "ApiError":
        """Return what a client is told of an error; one that it did not cause is raised again."""
        if isinstance(error, ApiError):
            return error
        if isinstance(error, ConfigError):
            return cls(400, str(error), param=error.field if isinstance(error, FieldError) else None)
        if isinstance(error, ReplicaGone):
            return cls(503, str(error), retry_after_s=1)
        if isinstance(error, RequestFailed):
            return cls(500, str(error))
        if isinstance(error, OSError) and error.errno in _FULL:
            remedy = "delete files that are needed no longer, or let the server have a larger disk"
            return cls(507, f"the server's disk is full ({error.strerror}), and nothing was stored; {remedy}")
        raise error

    @property
    def body(self) -> dict[str, Any]:
        """The error as the JSON of a response or of a stream's event."""
        return {"error": {"message": self.message, "type": _kind(self.status), "param": self.param, "code": self.code}}


def handle_errors(app: FastAPI) -> None:
    """Let an app answer errors in OpenAI's form."""

    async def answer(request: Request, error: Exception) -> JSONResponse:
        told = ApiError.of(error)
        return JSONResponse(told.body, told.status, headers=told.headers)

    async def answer_http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        if isinstance(error.__cause__, OSError):  # a form that cannot be held
            return await answer(request, error.__cause__)
        told = ApiError(error.status_code, str(error.detail))
        return JSONResponse(told.body, told.status, headers=error.headers)

    async def answer_invalid(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        told = _of_parameter(error)
        return JSONResponse(told.body, told.status)

    async def close(request: Request, error: Exception) -> Response:
        return Response(status_code=_CLIENT_GONE)

    app.add_exception_handler(ClientGone, close)
    app.add_exception_handler(ClientDisconnect, close)  # within the body
    for kind in (ApiError, ConfigError, ReplicaGone, RequestFailed, OSError):
        app.add_exception_handler(kind, answer)
    app.add_exception_handler(HTTPException, answer_http)
    app.add_exception_handler(RequestValidationError, answer_invalid)


def _of_parameter(error: RequestValidationError) -> ApiError:
    """Return what a client is told of the first wrong parameter in a path, a query or a form."""
    problem = error.errors()[0]
    name = cut(".".join(map(str, problem["loc"][1:]))) or "the body"
    match problem["type"]:
        case "missing":
            message = f"{name} is missing"
        case "extra_forbidden":
            message = f"unknown field {name_of(name)}"
        case "value_error":  # what pydantic has no word for: a file
            message = f"{name} must be an uploaded file, with a filename"
        case _:
            message = f"{name} must be {must_be(problem)}, not {short(problem['input'])}"
    return ApiError(400, message, param=name)


def _kind(status: int) -> str:
    return _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
