"""`OwnPairs`: a rank that has some of a mixture's experts computes the pairs of a token and an expert that are its own.

[Note: how pairs are dropped]
All ranks route all tokens, by routers that each of them has. Hooks around the module of experts, which holds a range of
them, hand it one line for each pair whose expert is in the range, by its number there; what it gives for the pairs is
added up for each token, and a sum over ranks follows. So no implementation of experts knows of the others: not
transformers' own, of which some clamp foreign numbers and compute them all the same, nor fused kernels, which choose
their products by the number of pairs. The price is that the host waits in each layer to learn how many pairs there are.
"""

from typing import Any

import torch
from torch import nn


class OwnPairs:
    """Hooks of one module of experts; one forward at a time.

    Args:
        experts: the range of their numbers.

    Attributes:
        num_computed: pairs that were handed to the module so far.
    """

    def __init__(self, experts: tuple[int, int]) -> None:
        self._experts = experts
        self._shape = (0, 0)
        self._places: torch.Tensor | None = None
        self.num_computed = 0

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def keep(self, module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Return the arguments of the own pairs, each as a token with one expert; a hook before the forward.

        Args:
            args: hidden states [tokens, width], and [tokens, experts of each] of numbers and of weights.
        """
        x, chosen, weights = args
        begin, end = self._experts
        numbers = chosen.reshape(-1)
        places = ((numbers >= begin) & (numbers < end)).nonzero().squeeze(1)
        self._shape, self._places = (chosen.shape[0], chosen.shape[1]), places
        self.num_computed += len(places)
        if not len(places):  # products of no lines are not supported everywhere
            return x[:1], torch.zeros_like(chosen[:1, :1]), weights[:1, :1]
        own = (numbers[places] - begin)[:, None]
        return x[places // chosen.shape[1]], own, weights.reshape(-1)[places, None]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def spread(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        """Return the sum of each token's pairs [tokens, width]; a hook after the forward."""
        places, (num_tokens, num_each) = self._places, self._shape
        assert places is not None
        self._places = None
        made = output.new_zeros((num_tokens * num_each, output.shape[-1]))
        if len(places):
            made[places] = output
        return made.view(num_tokens, num_each, -1).sum(dim=1)
