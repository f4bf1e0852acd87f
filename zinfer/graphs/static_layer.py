"""A layer's static KV cache, written by one kernel."""

from typing import Any

import torch
from transformers.cache_utils import StaticLayer

from zinfer.kernels.write_static import write_static


class FusedStaticLayer(StaticLayer):  # type: ignore[misc]
    """transformers' StaticLayer, with one kernel instead of five in `update` on a GPU.

    Attributes:
        arrivals: the kernel's counter of its programs.
    """

    arrivals: torch.Tensor

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate as transformers does, and the counter."""
        super().lazy_initialization(key_states, value_states)
        self.arrivals = torch.zeros((), dtype=torch.int32, device=self.device)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the tokens' keys and values.

        Args:
            key_states, value_states: [batch, heads, tokens, dim]; dim may differ.

        Returns:
            All keys and values, [batch, heads, max_cache_len, dim].
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.device.type == "cuda":
            write_static(self.keys, self.values, self.cumulative_length, self.arrivals, key_states, value_states)
        else:
            super().update(key_states, value_states)
        return self.keys, self.values
