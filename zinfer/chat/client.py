"""`ChatClient`: streams the answers of a server with OpenAI's interface."""

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import httpx2 as httpx

from zinfer.errors import ConfigError, JobError

_CONNECT_S: Final = 10.0
_MOST_SHOWN: Final = 500


@dataclass(frozen=True)
class Part:
    """A part of an answer: its new text; the last one has the number of tokens, if the server counts them."""

    text: str
    num_tokens: int | None = None


class ChatClient:
    """A client of one server, for one model.

    Args:
        url: of the server, with or without ``/v1``.
        api_key: for its requests.
        options: fields of every request's body, such as ``temperature``.
        uds: Unix socket that the server listens on.

    Attributes:
        model: name of the model; set by `open`.
    """

    def __init__(
        self, url: str, api_key: str | None = None, options: Mapping[str, Any] | None = None, uds: Path | None = None
    ) -> None:
        self.model = ""
        self._url = url.rstrip("/").removesuffix("/v1")
        self._options = dict(options or {})
        try:
            self._http = httpx.AsyncClient(
                base_url=self._url,
                headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
                timeout=httpx.Timeout(None, connect=_CONNECT_S),
                transport=None if uds is None else httpx.AsyncHTTPTransport(uds=str(uds)),
            )
        except (httpx.InvalidURL, UnicodeEncodeError) as error:
            raise ConfigError(f"--url {url!r:.100} or the API key cannot be used: {error}") from None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._http.aclose()

    async def is_ready(self) -> bool:
        """Whether the server takes requests."""
        try:
            return (await self._http.get("/ready", timeout=_CONNECT_S)).is_success
        except httpx.TransportError:
            return False

    async def open(self, model: str | None = None) -> None:
        """Find the model: the one of this name, or the server's first.

        Raises:
            ConfigError: the server has no such model, wants a key, or is none.
            JobError: it cannot be reached.
        """
        try:
            answer = await self._http.get("/v1/models")
        except httpx.UnsupportedProtocol:
            raise ConfigError(f"--url {self._url!r:.100} must begin with http:// or https://") from None
        except httpx.TransportError as error:
            raise self._unreachable(error) from None
        _check(answer)
        try:
            names = [each["id"] for each in answer.json()["data"]]
        except (ValueError, LookupError, TypeError):
            raise ConfigError(f"{self._url} is not the URL of a server with OpenAI's interface") from None
        if not names or (model is not None and model not in names):
            raise ConfigError(f"the server has no model {model or ''!r:.100}; it has {', '.join(names) or 'none'}")
        self.model = model or names[0]

    async def answer(self, messages: Sequence[Mapping[str, str]]) -> AsyncGenerator[Part, None]:
        """Yield the answer to a chat; leaving early ends it on the server too.

        Raises:
            ConfigError: the server refuses the request.
            JobError: the server fails, or cannot be reached.
        """
        body = {"model": self.model, "messages": list(messages), "stream": True, **self._options}
        body["stream_options"] = {"include_usage": True}
        try:
            async with self._http.stream("POST", "/v1/chat/completions", json=body) as answer:
                if answer.is_error:
                    await answer.aread()
                _check(answer)
                async for line in answer.aiter_lines():
                    if line.startswith("data: ") and (event := line.removeprefix("data: ")) != "[DONE]":
                        yield _part(json.loads(event))
        except httpx.TransportError as error:
            raise self._unreachable(error) from None

    def _unreachable(self, error: httpx.TransportError) -> JobError:
        return JobError(f"the server {self._url} does not answer: {str(error) or type(error).__name__}")


def _check(answer: httpx.Response) -> None:
    if not answer.is_error:
        return
    try:
        message = answer.json()["error"]["message"]
    except (ValueError, LookupError, TypeError):
        message = f"{answer.status_code} {answer.reason_phrase}: {answer.text[:_MOST_SHOWN]}"
    if answer.status_code == 401:
        message += "; here by --api-key or ZINFER_API_KEY"
    raise ConfigError(message) if answer.status_code < 500 else JobError(message)


def _part(event: Any) -> Part:
    if "error" in event:
        raise JobError(str(event["error"].get("message", event["error"])))
    text = "".join(each["delta"].get("content") or "" for each in event["choices"])
    return Part(text, (event.get("usage") or {}).get("completion_tokens"))
