"""Checks that ranks which compute one call together were given the same, before any of them computes.

With unequal inputs their sums would be of different texts, or wait for each other forever.
"""

from collections.abc import Mapping
from typing import Any, Final

import torch
import xxhash

from zinfer.errors import ConfigError, RankError
from zinfer.ranks.model_ranks import ModelRanks

_OWN: Final = frozenset({"past_key_values"})
"""Arguments that differ by rank: each has the keys and values of its own heads."""
_ATTENTIONS: Final = "output_attentions"
_PLAIN: Final = (str, int, float, bool, bytes, torch.dtype, type(None))


def check_agreement(
    ranks: ModelRanks, what: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], module: Any, device: torch.device
) -> None:
    """Compare a call's arguments on all ranks, and give all of them the first one's state of torch's random numbers.

    Args:
        what: the name of the call.
        module: the divided model.
        device: whose random numbers are compared, beside the CPU's.

    Raises:
        ConfigError: attentions are asked for, of which each rank has those of its own heads alone.
        RankError: the arguments of another rank differ, or another rank failed.
    """
    for config in (module.config, getattr(module, "generation_config", None)):
        if kwargs.get(_ATTENTIONS, getattr(config, _ATTENTIONS, False)):
            raise ConfigError(
                f"{what}: {_ATTENTIONS} gives the attentions of one rank's heads, not of all; leave it out, or let "
                "ranks share the weights instead of dividing layers (tensor_parallel.tp_size and ep_size 1)"
            )
    digest = xxhash.xxh3_128(what.encode())
    _add(digest, args)
    _add(digest, {name: value for name, value in kwargs.items() if name not in _OWN})
    members = ranks.mesh.ranks_in_step(ranks.group.rank)
    is_first = ranks.group.rank == members[0]
    several = ranks.exchange((digest.hexdigest(), _random_states(device) if is_first else None), members)
    for rank, (other, _) in zip(members, several, strict=True):
        if other != several[0][0]:
            failure = RankError(
                f"{what}: rank {rank} was given other arguments than rank {members[0]}; ranks that divide each layer "
                "(tensor_parallel.tp_size, ep_size) must make the same calls in the same order"
            )
            ranks.fail(failure)
            raise failure
    states = several[0][1]
    if not is_first and states is not None:
        torch.set_rng_state(states[0])
        if device.type == "cuda":
            torch.cuda.set_rng_state(states[1], device)


def _random_states(device: torch.device) -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


def _add(digest: Any, value: object) -> None:
    """Add a value to the digest; of objects that are no plain data only the type counts."""
    if isinstance(value, torch.Tensor):
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    elif isinstance(value, Mapping):
        for name in sorted(value, key=str):
            digest.update(str(name).encode())
            _add(digest, value[name])
    elif isinstance(value, list | tuple):
        digest.update(f"{len(value)}".encode())
        for each in value:
            _add(digest, each)
    else:
        text = repr(value) if isinstance(value, _PLAIN) else type(value).__qualname__
        digest.update(text.encode())
