"""Checks what a configuration asks for against a mixture's experts."""

from typing import Any

from torch import nn

from zinfer.errors import ConfigError
from zinfer.model.sharding.cut import Shard
from zinfer.model.spec import count_experts


def check_num_experts(model: nn.Module, num_experts: int | None) -> None:
    """Raise ConfigError if the model has another number of experts than ``num_experts``; None: not stated."""
    config: Any = getattr(model, "config", None)
    if num_experts is None:
        return
    found = count_experts(config.get_text_config()) if hasattr(config, "get_text_config") else 0
    if found != num_experts:
        has = f"{found} experts" if found else "no experts"
        raise ConfigError(
            f"moe.moe_experts is {num_experts}, but a {type(model).__name__} has {has} in each mixture; correct it, or "
            "leave it out"
        )


def check_ranks(num_experts: int, shard: Shard, holder: str) -> None:
    """Raise ConfigError if more ranks are to divide experts than there are; ``holder`` names what has them."""
    groups = shard.by_number
    if num_experts < groups.size:
        raise ConfigError(
            f"{groups.key} (ep_size) = {groups.size} is more than the {num_experts} experts of {holder}; divide them "
            f"among {num_experts} ranks at most, and let further ones be replicas (zinfer.parallel.replicas)"
        )
