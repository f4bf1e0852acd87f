"""`serve` and `client`: DeepSpeed-MII's persistent deployments, over `zinfer serve` in the background."""

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import httpx2 as httpx
import psutil
from pydantic import ValidationError

from zinfer.config import resolve_settings
from zinfer.errors import ConfigError
from zinfer.mii.mii_client import MIIClient
from zinfer.mii.registry import Deployment, MIIConfig, ModelConf, folder_of
from zinfer.mii.settings import ModelSettings, config_of
from zinfer.requests.field_errors import field_error
from zinfer.weights.hub import ensure_downloaded

_SERVER: Final = ("enable_restful_api", "restful_api_port", "restful_api_host")
_IDLE: Final = (
    *("port_number", "deployment_type", "replica_configs", "hf_auth_token", "version"),
    *("restful_processes", "hostfile", "instance_type"),
)


def serve(
    model_name_or_path: str = "",
    model_config: Mapping[str, Any] | None = None,
    mii_config: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> MIIClient:
    """Start a server in the background, which goes on when this process ends, and return a client once it is loaded.

    An exception while it loads, such as Ctrl-C, ends it.

    Args:
        model_name_or_path: a checkpoint folder with its tokenizer, or a name on the hub.
        model_config: keywords of the model as a mapping.
        mii_config: keywords of the deployment as a mapping, and of the model under ``model_config``.
        kwargs: ``deployment_name`` (by default the folder's name), ``tensor_parallel``, ``replica_num``,
            ``enable_restful_api``, ``restful_api_host`` and ``restful_api_port`` (28080), and those of
            `zinfer.mii.settings`. Without the REST API it listens on a Unix socket that only this user may use.

    Raises:
        ConfigError: a keyword cannot be used, or a deployment of this name runs.
        CheckpointError: there is no such folder, and no such model on the hub.
        RuntimeError: the server did not start; says what it printed last.
    """
    outer = {**(mii_config or {}), **kwargs}
    given = {**outer.pop("model_config", {}), **(model_config or {}), **outer}
    words = {name: value for name, value in given.items() if name not in _IDLE}
    server = {name: words.pop(name) for name in _SERVER if name in words}
    num_replicas, name = words.pop("replica_num", 1), words.pop("deployment_name", None)
    settings = config_of(model_name_or_path, None, words)
    if settings.tokenizer is not None or settings.max_length is not None:
        raise ConfigError("tokenizer and max_length are for a pipeline; remove them")
    name = name or Path(settings.model).resolve().name
    folder, model = folder_of(name), {"model_name_or_path": settings.model, "replica_num": num_replicas}
    model["tensor_parallel"] = settings.num_ranks
    try:
        config = MIIConfig(deployment_name=name, model_conf=ModelConf(**model), **server)
    except ValidationError as error:
        raise ConfigError(field_error(error, MIIConfig)) from None
    _refuse_second(name)
    ensure_downloaded(settings.model, download=resolve_settings(settings.config, swaps=True).download)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    (folder / "config.json").write_text(json.dumps(settings.config), encoding="utf-8")
    return MIIClient(_start(_command(config, settings, folder), config))


def _command(config: MIIConfig, settings: ModelSettings, folder: Path) -> list[str]:
    model = config.model_conf
    command = [sys.executable, "-m", "zinfer", "serve", "--model", settings.model]
    command += ["--served-model-name", config.deployment_name, "--config", str(folder / "config.json")]
    command += ["--replicas", str(model.replica_num), "--ranks", str(model.tensor_parallel)]
    command += ["--device", settings.device] if settings.device else []
    if config.enable_restful_api:
        return [*command, "--host", config.restful_api_host, "--port", str(config.restful_api_port)]
    return [*command, "--uds", str(folder / "socket")]


def client(model_or_deployment_name: str) -> MIIClient:
    """Return a client of a deployment that any process of this user has started on this machine.

    Raises:
        ConfigError: none of this name runs.
    """
    return MIIClient(Deployment.find(Path(model_or_deployment_name).name))


def _refuse_second(name: str) -> None:
    try:
        found = Deployment.find(name)
    except ConfigError:
        return
    raise ConfigError(f"a deployment {name!r} runs already as process {found.pid}; terminate it, or give another name")


def _start(command: list[str], config: MIIConfig) -> Deployment:
    """Start a server's process, and wait until it takes requests; an exception ends it."""
    with (folder_of(config.deployment_name) / "log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    started_s = psutil.Process(process.pid).create_time()
    deployment = Deployment(pid=process.pid, started_s=started_s, mii_config=config)
    try:
        deployment.keep()
        if _becomes_ready(process, deployment):
            return deployment
    except BaseException:  # Ctrl-C: nobody has a client to end it with
        deployment.terminate()
        raise
    said = deployment.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    raise RuntimeError(
        f"the deployment {deployment.name!r} did not start: {said[-1] if said else 'it printed nothing'}"
    )


def _becomes_ready(process: "subprocess.Popen[bytes]", deployment: Deployment) -> bool:
    """Wait until the server takes requests; False: its process has ended."""
    with deployment.connect() as http:
        while process.poll() is None:
            try:
                if http.get("/ready", timeout=5).is_success:
                    return True
            except httpx.TransportError:
                pass  # it loads, and does not listen yet
            time.sleep(0.1)
    return False
