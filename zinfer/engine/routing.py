"""Skewed routing for mixtures with random weights, whose own routers choose all experts about equally often."""

from typing import Any

import torch
from torch import nn

from zinfer.errors import ConfigError


def skew_routers(model: nn.Module) -> int:
    """Make each router choose its experts by Zipf's law: expert number n about 1/n times as often as the first.

    A hook on each router replaces its choice by the top of its own logits minus log n, once they have Gumbel's
    distribution over the experts of each token: its maximum then falls on n with a probability in proportion to 1/n
    (the Gumbel-max trick). The routing weights stay those that the router computed, so the work is that of a trained
    mixture whose experts are chosen unevenly; the text is as random as the weights.

    Returns:
        The number of routers.

    Raises:
        ConfigError: the model has no routers that return logits, weights and indices, as transformers' do.
    """
    routers = [module for module in model.modules() if type(module).__name__.endswith("Router")]
    usable = [module for module in routers if isinstance(getattr(module, "top_k", None), int)]
    if not usable or len(usable) != len(routers):
        what = "has no experts" if not routers else f"has routers ({type(routers[0]).__name__}) that cannot be skewed"
        raise ConfigError(f"--experts zipf: {type(model).__name__} {what}; use --experts uniform")
    for module in usable:
        module.register_forward_hook(_choose_skewed)
    return len(usable)


def _choose_skewed(router: nn.Module, args: Any, output: Any) -> Any:
    logits_TE, weights, indices_TK = output
    return logits_TE, weights, skewed_choice(logits_TE, indices_TK.shape[-1]).to(indices_TK.dtype)


def skewed_choice(logits_TE: torch.Tensor, num_chosen: int) -> torch.Tensor:
    """Return the experts of each token [tokens, num_chosen], all different; see `skew_routers`."""
    logits_TE = logits_TE.float()
    spread_T1 = logits_TE.std(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    standard_TE = (logits_TE - logits_TE.mean(dim=-1, keepdim=True)) / spread_T1
    below_TE = torch.special.ndtr(standard_TE.double()).clamp(1e-9, 1 - 1e-9)  # shares of a normal distribution
    gumbel_TE = -torch.log(-torch.log(below_TE))
    ranks_E = torch.arange(1, logits_TE.shape[-1] + 1, device=logits_TE.device)
    return (gumbel_TE - ranks_E.log()).topk(num_chosen, dim=-1).indices
