"""Ranks that share a model as actors of Ray, in one placement group on one node."""

import os
import socket
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Final, Self

import ray
from ray.exceptions import RayActorError
from ray.util.placement_group import get_current_placement_group, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from zinfer.errors import ConfigError, RankError
from zinfer.ranks.environment import KEY, draw_key
from zinfer.ranks.sockets import reserve_port

_END_S: Final = 60.0  # in which a failure of one rank ends the others


class RankActors:
    """Processes on one node of Ray that share a model; each may make a `zinfer.LLM`, which finds the others.

    Each rank has the variables that torchrun would set, before torch is imported in it. Make it in the driver: within
    an actor or task that has a placement group itself, Ray would wait for resources that its own group holds.

    Args:
        size: number of ranks.
        num_cpus: of each rank.
        num_gpus: of each rank, 0 or 1.
        timeout_s: in which Ray finds a node with as many CPUs and GPUs.

    Raises:
        ConfigError: the numbers are none that ranks can have, or this is called within a placement group.
        RankError: no node has so much to give until the timeout, or a rank ended.
    """

    def __init__(self, size: int, *, num_cpus: float = 1, num_gpus: int = 0, timeout_s: float = 300) -> None:
        if size < 1 or num_gpus not in (0, 1):
            raise ConfigError(f"size is {size} and num_gpus {num_gpus}; give at least one rank, and 0 or 1 GPU to each")
        if get_current_placement_group() is not None:
            raise ConfigError(
                "ranks within a placement group would wait for what it holds itself; make them in the driver"
            )
        self.size = size
        self._actors: list[Any] = []
        self._group = placement_group([{"CPU": num_cpus, **({"GPU": 1} if num_gpus else {})}] * size, "STRICT_PACK")
        try:
            if not self._group.wait(timeout_s):
                raise RankError(
                    f"no node of Ray has had {size * num_cpus:g} CPUs and {size * num_gpus} GPUs free for "
                    f"{timeout_s:g} s; ask for fewer ranks, or end what holds them"
                )
            self._actors = [self._start(rank, num_cpus, num_gpus) for rank in range(size)]
            self._let_find_each_other()
        except BaseException:
            self.close()
            raise

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Return what ``function(rank, *args)`` returns in each rank, by rank; all run it at the same time.

        After a failure the others have a minute to end by themselves, and the group cannot be used any more.

        Raises:
            RankError: a rank was killed or lost, or the ranks have ended.
            Exception: what the function raised, on the first rank that did, as Ray passes it on.
        """
        if not self._actors:
            raise RankError("these ranks have ended; make new ones")
        calls = [actor.call.remote(function, rank, *args) for rank, actor in enumerate(self._actors)]
        failures: dict[int, Exception] = {}
        left, until_s = list(calls), float("inf")
        while left and time.monotonic() < until_s:
            done, left = ray.wait(left, num_returns=1, timeout=1.0)
            for call in done:
                try:
                    ray.get(call)
                except Exception as failure:  # raised below, once the first cause is known
                    failures[calls.index(call)] = failure
                    until_s = min(until_s, time.monotonic() + _END_S)
        if failures:
            self.close()
            _raise_first(failures)
        return list(ray.get(calls))

    def close(self) -> None:
        """End the processes and give their CPUs and GPUs back. May be called again."""
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []
        remove_placement_group(self._group)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, rank: int, num_cpus: float, num_gpus: int) -> Any:
        strategy = PlacementGroupSchedulingStrategy(self._group, rank, placement_group_capture_child_tasks=False)
        return ray.remote(_Rank).options(num_cpus=num_cpus, num_gpus=num_gpus, scheduling_strategy=strategy).remote()

    def _let_find_each_other(self) -> None:
        try:
            address, port = ray.get(self._actors[0].find_address.remote())
            gpus = [each for several in ray.get([actor.gpus.remote() for actor in self._actors]) for each in several]
            key = draw_key()
            ray.get(
                [
                    actor.enter.remote(rank_variables(rank, self.size, address, port, gpus) | {KEY: key})
                    for rank, actor in enumerate(self._actors)
                ]
            )
        except RayActorError as error:
            raise RankError(f"a rank ended while it started: {error}") from error


class _Rank:
    """One rank: a process of Ray's."""

    _port: socket.socket  # reserved as long as this process lives: rank 0 may listen any time

    def find_address(self) -> tuple[str, int]:
        """Return this node's address and a port that no other process gets."""
        self._port = reserve_port()
        return ray.util.get_node_ip_address(), self._port.getsockname()[1]

    def gpus(self) -> list[str]:
        """Return the GPUs that Ray gave this rank."""
        return [str(each) for each in ray.get_gpu_ids()]

    def enter(self, variables: dict[str, str]) -> None:
        os.environ.update(variables)

    def call(self, function: Callable[..., Any], rank: int, *args: Any) -> Any:
        return function(rank, *args)


def rank_variables(rank: int, size: int, address: str, port: int, gpus: Sequence[str]) -> dict[str, str]:
    """Return the variables of a rank. All see the GPUs of all, as torchrun's do, and take that of their local rank."""
    found = {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }
    return found | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})


def _raise_first(failures: dict[int, Exception]) -> None:
    """Raise the failure that caused the others: a lost rank's, else one that is not about another rank."""
    for rank, failure in failures.items():
        if isinstance(failure, RayActorError):
            raise RankError(f"rank {rank} of Ray's was killed or lost: {failure}") from failure
    own = [failure for failure in failures.values() if not isinstance(failure, RankError)]
    raise (own or list(failures.values()))[0]
