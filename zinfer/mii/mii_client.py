"""`MIIClient`: sends prompts to a deployment that `serve` has started."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import httpx2 as httpx

from zinfer.errors import ConfigError
from zinfer.mii.registry import Deployment, MIIConfig
from zinfer.mii.response import GenerationFinishReason, Response


class MIIClient:
    """A client of one deployment; `zinfer.mii.client` finds it by name.

    Attributes:
        deployment: where it runs.
    """

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment
        self._http = deployment.connect()

    def __call__(self, *args: Any, **kwargs: Any) -> list[Response]:
        """As `generate`."""
        return self.generate(*args, **kwargs)

    def generate(
        self,
        prompts: str | Sequence[str],
        streaming_fn: Callable[[list[Response]], object] | None = None,
        **generate_kwargs: Any,
    ) -> list[Response]:
        """Return a response for each prompt, in order.

        Args:
            prompts: one, or several.
            streaming_fn: called with each part of the text of a single prompt as it comes; nothing is returned then.
            generate_kwargs: fields of `zinfer.requests.mii_params.MIIParams`, such as ``max_new_tokens``.

        Raises:
            ConfigError: a prompt or a keyword cannot be used.
            RuntimeError: the deployment has failed, or is gone.
        """
        several = [prompts] if isinstance(prompts, str) else list(prompts)
        body = {"prompts": several, **generate_kwargs}
        try:
            if streaming_fn is None:
                answer = self._http.post(self._path, json=body)
                _check(answer)
                return [_response(each) for each in answer.json()]
            if len(several) != 1:
                raise ConfigError(f"streaming_fn takes one prompt, not {len(several)}")
            with self._http.stream("POST", self._path, json={**body, "stream": True}) as answer:
                if answer.is_error:
                    answer.read()
                _check(answer)
                for line in answer.iter_lines():
                    if line.startswith("data: "):
                        _read_part(json.loads(line.removeprefix("data: ")), streaming_fn)
            return []
        except httpx.TransportError as error:
            raise RuntimeError(
                f"the deployment {self.deployment.name!r} does not answer ({error}); its log is {self.deployment.log}"
            ) from error

    def terminate_server(self) -> None:
        """End the deployment; returns once its processes have ended."""
        self._http.close()
        self.deployment.terminate()

    @property
    def mii_config(self) -> MIIConfig:
        """What the deployment was told when it was started, by MII's names."""
        return self.deployment.mii_config

    @property
    def _path(self) -> str:
        return f"/mii/{self.deployment.name}"


def _check(answer: httpx.Response) -> None:
    if answer.is_error:
        message = answer.json()["error"]["message"]
        raise ConfigError(message) if answer.status_code < 500 else RuntimeError(message)


def _read_part(part: Any, streaming_fn: Callable[[list[Response]], object]) -> None:
    if isinstance(part, dict):
        raise RuntimeError(part["error"]["message"])
    streaming_fn([_response(each) for each in part])


def _response(fields: dict[str, Any]) -> Response:
    return Response(**{**fields, "finish_reason": GenerationFinishReason(fields["finish_reason"])})
