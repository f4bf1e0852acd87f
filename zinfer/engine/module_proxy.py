"""A module around another one: what it has not itself, that one may have; and its weights are not to be moved."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from zinfer.errors import ConfigError
from zinfer.model.build import find_dtype


class AroundModule(nn.Module):
    """Passes on what is asked of it.

    Attributes:
        module: the one inside.
        device: where it computes.
    """

    module: PreTrainedModel
    device: torch.device

    def __getattr__(self, name: str) -> Any:
        """What the engine has not, its module may have."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":  # not there yet
                raise
        return getattr(self.module, name)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "AroundModule":
        """What `to`, `cuda`, `half` and their like do to each tensor: nothing here, or it is refused.

        Raises:
            ConfigError: it would move or cast the weights.
        """
        dtype = find_dtype(self.module)
        after = fn(torch.empty(0, dtype=dtype, device=self.device))
        if after.device != self.device or after.dtype != dtype:
            raise ConfigError(
                f"the engine computes on {self.device} in {dtype}, and its weights stay where the plan has put them; "
                "state zinfer.device and dtype in the configuration instead of moving or casting it"
            )
        return self
