"""`Deployment`: a server that runs in the background, and what is noted of it for other processes of this user."""

import os
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Final

import httpx2 as httpx
import psutil
from pydantic import BaseModel, ConfigDict

from zinfer.errors import ConfigError
from zinfer.nvme.whole_file import replace_file

_NAME: Final = re.compile(r"[\w.-]{1,80}")
_END_S: Final = 120.0


def registry() -> Path:
    """Return the folder of all deployments: ``ZINFER_MII``, or one in the user's cache."""
    return Path(os.environ.get("ZINFER_MII") or Path.home() / ".cache" / "zinfer" / "mii")


class ModelConf(BaseModel):
    """What a deployment was told of its model, by MII's names."""

    model_config = ConfigDict(frozen=True, protected_namespaces=())

    model_name_or_path: str
    tensor_parallel: int = 1
    replica_num: int = 1


class MIIConfig(BaseModel):
    """What a deployment was told, by MII's names.

    Attributes:
        model_conf: of its model.
        restful_api_host, restful_api_port: where it listens with ``enable_restful_api``.
    """

    model_config = ConfigDict(frozen=True, protected_namespaces=())

    deployment_name: str
    model_conf: ModelConf
    enable_restful_api: bool = False
    restful_api_host: str = "localhost"
    restful_api_port: int = 28080


class Deployment(BaseModel):
    """A deployment: its server's process, and what it was told.

    Attributes:
        pid, started_s: the server's process, and when the system says that it began.
    """

    pid: int
    started_s: float
    mii_config: MIIConfig

    @property
    def name(self) -> str:
        """The deployment's name."""
        return self.mii_config.deployment_name

    @property
    def url(self) -> str | None:
        """The server's address; None: it listens on the Unix socket in the folder."""
        told = self.mii_config
        return f"http://{told.restful_api_host}:{told.restful_api_port}" if told.enable_restful_api else None

    @classmethod
    def find(cls, name: str) -> "Deployment":
        """Return the deployment of this name. Raises ConfigError if none runs."""
        path = folder_of(name) / "deployment.json"
        found = cls.model_validate_json(path.read_bytes()) if path.is_file() else None
        if found is None or not found.is_running:
            raise ConfigError(f"no deployment {name!r} runs; start it by zinfer.mii.serve(..., deployment_name=...)")
        return found

    @property
    def folder(self) -> Path:
        """Where its files are."""
        return folder_of(self.name)

    @property
    def log(self) -> Path:
        """What its processes print."""
        return self.folder / "log"

    @property
    def is_running(self) -> bool:
        """Whether its process lives."""
        try:
            process = psutil.Process(self.pid)
            return bool(process.create_time() == self.started_s and process.status() != psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return False

    def keep(self) -> None:
        """Note it for other processes."""
        replace_file(self.folder / "deployment.json", self.model_dump_json())

    def connect(self) -> httpx.Client:
        """Return a client of its server; no answer takes too long."""
        if self.url is not None:
            return httpx.Client(base_url=self.url, timeout=None)
        transport = httpx.HTTPTransport(uds=str(self.folder / "socket"))
        return httpx.Client(base_url="http://localhost", transport=transport, timeout=None)

    def terminate(self) -> None:
        """End its processes, and forget it. Raises RuntimeError if they do not end."""
        if self.is_running:
            os.kill(self.pid, signal.SIGTERM)
        end_s = time.monotonic() + _END_S
        while self.is_running:
            if time.monotonic() > end_s:
                raise RuntimeError(f"process {self.pid} of the deployment {self.name!r} does not end; see {self.log}")
            time.sleep(0.05)
        shutil.rmtree(self.folder, ignore_errors=True)


def folder_of(name: str) -> Path:
    """Return a deployment's folder. Raises ConfigError for a name that cannot be one's."""
    if _NAME.fullmatch(name) is None or name.startswith("."):
        raise ConfigError(f"deployment_name must be of letters, digits, '-', '_' and '.', not {name!r:.100}")
    return registry() / name
