"""A layer's keys and values in static places, written by one kernel."""

from typing import Any

import torch
from transformers.cache_utils import StaticLayer

from zinfer.kernels.write_static import write_static


class FusedStaticLayer(StaticLayer):  # type: ignore[misc]
    """transformers' own but for `update` on a GPU, which is five kernels there.

    Attributes:
        arrivals: what the kernel counts its programs with.
    """

    arrivals: torch.Tensor

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """As transformers' own."""
        super().lazy_initialization(key_states, value_states)
        self.arrivals = torch.zeros((), dtype=torch.int32, device=self.device)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the tokens' keys and values behind those that are there.

        Args:
            key_states, value_states: [batch, heads, tokens, dim], each with a dim of its own.

        Returns:
            Those of all places, [batch, heads, max_cache_len, dim].
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.device.type == "cuda":
            write_static(self.keys, self.values, self.cumulative_length, self.arrivals, key_states, value_states)
        else:
            super().update(key_states, value_states)
        return self.keys, self.values
