"""Runs a server: the replicas' processes, and the HTTP application in this one."""

import asyncio
import errno
import logging
import resource
import signal
import socket
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import uvicorn
import uvloop

from zinfer.errors import ConfigError
from zinfer.serve import files_folder
from zinfer.serve.app import FILE_QUOTA_BYTES, MOST_BODY_BYTES, MOST_FILE_BYTES, make_app
from zinfer.serve.http_protocol import bounded_protocol
from zinfer.serve.replica import Replica
from zinfer.serve.replica_process import ReplicaProcess
from zinfer.serve.service import Service, ServiceLimits
from zinfer.serve.service_manager import ServiceManager
from zinfer.serve.tasks import beside

_DRAIN_S: Final = 60
_MAX_SOCKET_PATH_BYTES: Final = 107  # of Linux
_KEEP_ALIVE_S: Final = 75
"""Seconds for which a connection stays open without a request: longer than clients and proxies keep one in their pools,
which else may send on a connection that is being closed (httpx keeps them for 5 s, many proxies for 60)."""


@dataclass(frozen=True)
class ServerOptions:
    """Where and for whom a server listens.

    Attributes:
        names: of the model; the first one is told to clients.
        uds: path of a Unix socket to listen on instead of host and port.
        certificate, key_file: PEM files for TLS.
        root_path: prefix that a proxy strips.
        api_keys, origins, most_body_bytes, most_file_bytes, file_quota_bytes, folder: as for `make_app`.
        drain_s: how long requests under way may take after SIGTERM.
        arrive_s: how long a request may take to arrive, and its answer to be read, as for `BoundedProtocol`.
    """

    names: Sequence[str]
    host: str = "127.0.0.1"
    port: int = 8000
    uds: Path | None = None
    certificate: Path | None = None
    key_file: Path | None = None
    api_keys: Sequence[str] = ()
    origins: Sequence[str] = ()
    root_path: str = ""
    most_body_bytes: int = MOST_BODY_BYTES
    most_file_bytes: int = MOST_FILE_BYTES
    folder: Path | None = None
    drain_s: int = _DRAIN_S
    arrive_s: float = 20.0
    file_quota_bytes: int = FILE_QUOTA_BYTES


class _Server(uvicorn.Server):
    """Ends by SIGTERM or SIGINT as if nobody had signalled; a second SIGINT does not wait for requests.

    The file of its Unix socket ends with it, unless another server has put its own in the place.
    """

    _socket_file: tuple[int, int] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._socket_file = self._find_socket_file()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self.config.uds is not None and self._socket_file == self._find_socket_file() is not None:
            Path(self.config.uds).unlink(missing_ok=True)
        await super().shutdown(sockets)

    def _find_socket_file(self) -> tuple[int, int] | None:
        """Return the device and number of the socket's file; None if there is none."""
        if self.config.uds is None or not Path(self.config.uds).exists():
            return None
        found = Path(self.config.uds).stat()
        return found.st_dev, found.st_ino

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)


def serve(
    processes: Sequence[ReplicaProcess],
    tokenizer: Any,
    options: ServerOptions,
    limits: ServiceLimits,
    say: Callable[[str], object],
) -> None:
    """Start replicas, listen until SIGTERM or SIGINT, let the requests under way end, and end the replicas.

    The address is taken before the model is loaded, and connections wait until it is.

    Args:
        processes: one for each replica, perhaps started already.
        say: told where the server listens, once it does.

    Raises:
        ConfigError: the folder of files cannot be used, or another server uses it; the address cannot be used.
        ConfigError, JobError: a replica did not start.
    """
    _raise_file_limit()
    own = nullcontext() if options.folder is None else files_folder.locked(options.folder)
    with own:
        replicas = [Replica(index, process) for index, process in enumerate(processes)]
        # asyncio's own loop leaves Nagle's algorithm on here: a body waits 40 ms for its head's acknowledgement.
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(Service(replicas, tokenizer, options.names, limits), options, say))


async def _serve(service: Service, options: ServerOptions, say: Callable[[str], object]) -> None:
    app = make_app(
        service,
        keys=options.api_keys,
        origins=options.origins,
        most_body_bytes=options.most_body_bytes,
        most_file_bytes=options.most_file_bytes,
        file_quota_bytes=options.file_quota_bytes,
        folder=options.folder,
    )
    config = uvicorn.Config(
        app,
        host=options.host,
        port=options.port,
        uds=None if options.uds is None else str(options.uds),
        root_path=options.root_path.rstrip("/"),
        http=bounded_protocol(options.arrive_s, options.origins),
        ssl_certfile=options.certificate,
        ssl_keyfile=options.key_file,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=options.drain_s,
        timeout_keep_alive=_KEEP_ALIVE_S,
    )
    try:
        config.load()  # TLS files and addresses are refused before the model is loaded
    except OSError as error:
        files = f"--ssl-certfile {options.certificate} and --ssl-keyfile {options.key_file}"
        raise ConfigError(f"{files} cannot be used: {error.strerror or error}; give PEM files of one pair") from error
    if options.uds is not None:
        _check_socket_path(options.uds)
    sockets = [] if options.uds is not None else [_bind(options)]
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    try:
        await service.start()
    except BaseException:
        await service.close()
        for each in sockets:
            each.close()
        raise
    if service.latency:
        say(service.latency)
    server = _Server(config)
    async with beside(_announce(server, options, sockets, say)):
        await server.serve(sockets or None)


def _bind(options: ServerOptions) -> socket.socket:
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    try:
        return socket.create_server((options.host, options.port), family=family, backlog=2048)
    except OSError as error:
        reason, remedy = error.strerror or str(error), "give another --host"
        if error.errno == errno.EADDRINUSE:
            reason, remedy = "another program listens there", "end it, or give another --port (0: any that is free)"
        elif error.errno in (errno.EACCES, errno.EPERM):
            remedy = "give a --port of at least 1024, or the right to use this one"
        raise ConfigError(f"cannot listen on {options.host} port {options.port}: {reason}; {remedy}") from error


def _check_socket_path(path: Path) -> None:
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--uds {path}: there is no folder {path.absolute().parent}; make it, or give another path")
    if len(str(path).encode()) > _MAX_SOCKET_PATH_BYTES:
        raise ConfigError(f"--uds {path} has more than {_MAX_SOCKET_PATH_BYTES} bytes; give a shorter path")


def _raise_file_limit() -> None:
    """Take as many open files as the system allows: each connection is one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def _announce(
    server: uvicorn.Server, options: ServerOptions, sockets: Sequence[socket.socket], say: Callable[[str], object]
) -> None:
    """Tell where the server listens, once it does; and the service manager, for as long as it does."""
    while not server.started:
        await asyncio.sleep(0.01)
    if options.uds is not None:
        say(f"serving {options.names[0]} on {options.uds}")
    else:
        scheme = "http" if options.certificate is None else "https"
        host = f"[{options.host}]" if ":" in options.host else options.host
        url = f"{scheme}://{host}:{sockets[0].getsockname()[1]}"
        say(f"open {url}/ in a browser: a chat, and what the server does; {url}/docs lists its routes")
        say(f"serving {options.names[0]} on {url}/v1")
    await ServiceManager().watch()
