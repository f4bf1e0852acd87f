"""Torch's elastic launcher for the processes of one host, which listens on no port.

Its own rendezvous keeps a store on a port of all interfaces, asks for no key, and unpickles what it finds there.
"""

from typing import Final

from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

BACKEND: Final = "zinfer-one-host"


class _OneHost(RendezvousHandler):
    """The rendezvous of one launcher with itself; its endpoint is where rank 0 will listen."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        host, port = parameters.endpoint.rsplit(":", 1)
        self._run_id, self._first = parameters.run_id, RendezvousStoreInfo(host, int(port))
        self._is_closed = False

    def get_backend(self) -> str:
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(HashStore(), 0, 1, self._first)

    def is_closed(self) -> bool:
        return self._is_closed

    def set_closed(self) -> None:
        self._is_closed = True

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        self._is_closed = True
        return True


def register_one_host() -> None:
    """Let the launcher know it by `BACKEND`. May be called once in a process."""
    rendezvous_handler_registry.register(BACKEND, _OneHost)
