"""The replicas of a server together: which of them takes a request, and what each does."""

from collections.abc import Sequence
from typing import Any

import msgspec

from zinfer.serve.errors import ReplicaGone
from zinfer.serve.replica import Replica


def choose(replicas: Sequence[Replica], prompt_ids: Sequence[int] = (), num_new: int = 0) -> Replica:
    """Return the replica for a request: the ready one that knows most of its prompt, unless that is clearly busier.

    Among replicas that know as much, it is the one with the fewest outstanding tokens. One is clearly busier if it has
    half as many more than the one with the fewest, and the tokens of two such requests.

    Args:
        num_new: the request's most new tokens.

    Raises:
        ReplicaGone: none is ready.
    """
    ready = [each for each in replicas if each.ready is not None]
    if not ready:
        raise ReplicaGone("the model is loading; try again in a while")
    most = 1.5 * min(each.outstanding for each in ready) + 2 * (len(prompt_ids) + num_new)
    return min(
        (each for each in ready if each.outstanding <= most),
        key=lambda each: (-each.prefixes.num_shared(prompt_ids), each.outstanding),
    )


def describe(replicas: Sequence[Replica]) -> list[dict[str, Any]]:
    """Return each replica's state, for `/load`; `engine` is null until it has reported."""
    return [
        {
            "replica": each.index,
            "is_ready": each.ready is not None,
            "outstanding_tokens": each.outstanding,
            "restarts": each.num_restarts,
            "running_sequences": 0 if each.load is None else each.load.num_running,
            "waiting_sequences": each.num_waiting,
            "background_sequences": each.num_background,
            "engine": None if each.load is None else msgspec.to_builtins(each.load),
        }
        for each in replicas
    ]
