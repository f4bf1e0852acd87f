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

from zinfer.errors import ConfigError
from zinfer.mii.mii_client import MIIClient
from zinfer.mii.registry import Deployment, folder_of
from zinfer.mii.settings import config_of

_SERVER: Final = {"enable_restful_api": False, "restful_api_port": 28080, "restful_api_host": "localhost"}
_IDLE: Final = ("port_number", "deployment_type", "replica_configs", "hf_auth_token", "version")


def serve(model_name_or_path: str = "", model_config: Mapping[str, Any] | None = None, **kwargs: Any) -> MIIClient:
    """Start a server in the background, which goes on when this process ends, and return a client once it is loaded.

    Args:
        model_name_or_path: a checkpoint folder with its tokenizer.
        model_config: keywords of the model as a mapping.
        kwargs: ``deployment_name`` (by default the folder's name), ``tensor_parallel``, ``replica_num``,
            ``enable_restful_api``, ``restful_api_host`` and ``restful_api_port`` (28080), and those of
            `zinfer.mii.settings`. Without the REST API it listens on a Unix socket that only this user may use.

    Raises:
        ConfigError: a keyword cannot be used, or a deployment of this name runs.
        RuntimeError: the server did not start; says what it printed last.
    """
    words = {name: value for name, value in kwargs.items() if name not in _IDLE}
    server = {name: words.pop(name, default) for name, default in _SERVER.items()}
    num_replicas, name = words.pop("replica_num", 1), words.pop("deployment_name", None)
    settings = config_of(model_name_or_path, model_config, words)
    if settings.tokenizer is not None or settings.max_length is not None:
        raise ConfigError("tokenizer and max_length are for a pipeline; remove them")
    name = name or Path(settings.model).resolve().name
    folder = folder_of(name)
    command = [sys.executable, "-m", "zinfer", "serve", "--model", settings.model, "--served-model-name", name]
    command += ["--replicas", str(num_replicas), "--config", str(folder / "config.json")]
    command += ["--ranks", str(settings.num_ranks)]
    command += ["--device", settings.device] if settings.device else []
    if server["enable_restful_api"]:
        command += ["--host", server["restful_api_host"], "--port", str(server["restful_api_port"])]
    else:
        command += ["--uds", str(folder / "socket")]
    _refuse_second(name)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    (folder / "config.json").write_text(json.dumps(settings.config), encoding="utf-8")
    url = f"http://{server['restful_api_host']}:{server['restful_api_port']}"
    return MIIClient(_start(name, command, url if server["enable_restful_api"] else None))


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


def _start(name: str, command: list[str], url: str | None) -> Deployment:
    """Start a server's process, and wait until it takes requests."""
    folder = folder_of(name)
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    started_s = psutil.Process(process.pid).create_time()
    deployment = Deployment(name=name, pid=process.pid, started_s=started_s, url=url)
    deployment.keep()
    with deployment.connect() as http:
        while process.poll() is None:
            try:
                if http.get("/ready", timeout=5).is_success:
                    return deployment
            except httpx.TransportError:
                pass  # it loads, and does not listen yet
            time.sleep(0.1)
    said = deployment.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    raise RuntimeError(f"the deployment {name!r} did not start: {said[-1] if said else 'it printed nothing'}")
