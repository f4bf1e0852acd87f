"""Paged attention for transformers' attention modules, used while a pass runs.

transformers looks up the attention function in `AttentionInterface` by the name in the model's config. No mask function
is registered under our name, so that no mask is made; families that require a mask use a second name.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from zinfer.batching.ragged import Part
from zinfer.errors import ConfigError
from zinfer.kernels.attention_arguments import AttentionRule
from zinfer.kernels.kv_pages import KVPages
from zinfer.kernels.paged_attention import paged_attention
from zinfer.kernels.write_pages import write_pages
from zinfer.model.module_patches import is_patched

NAME: Final = "zinfer_paged"
MASKED_NAME: Final = "zinfer_paged_masked"


class PagedAttention:
    """The attention of the current part of a pass.

    Args:
        layers: each layer's pages; None for those that are not on the device.
    """

    def __init__(self, layers: Sequence[KVPages | None]) -> None:
        self._layers = layers
        self._part: Part | None = None

    @contextmanager
    def over(self, part: Part) -> Iterator[None]:
        """Context manager: set the part that modules compute."""
        before, self._part = self._part, part
        try:
            yield
        finally:
            self._part = before

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: AttentionRule
    ) -> torch.Tensor:
        """Write the tokens' keys and values, then let each token attend to its sequence up to itself.

        Args:
            query: [tokens, heads, head_dim]; key, value alike with their own heads; any strides.

        Returns:
            [tokens, heads, value_dim].

        Raises:
            ConfigError: the layer's keys and values are not those that the model's config lets pages be made for.
        """
        assert self._part is not None, "no pass is under way"
        pages = self._layers[layer]
        assert pages is not None, f"the pages of layer {layer} are not on the device"
        if key.shape[1:] != pages.keys.shape[2:] or value.shape[1:] != pages.values.shape[2:]:
            raise ConfigError(
                f"keys of {_heads(key)} and values of {_heads(value)} in layer {layer} do not fit its pages, of "
                f"{_heads(pages.keys)} and {_heads(pages.values)}"
            )
        write_pages(pages, key, value, self._part.places)
        return paged_attention(query, pages, self._part.layout, rule)


def _heads(tensor: torch.Tensor) -> str:
    return f"{tensor.shape[-2]} heads x {tensor.shape[-1]}"


_current: ContextVar[PagedAttention] = ContextVar("zinfer_paged_attention")


@contextmanager
def attending(attention: PagedAttention) -> Iterator[None]:
    """Context manager: make transformers' modules use this attention."""
    token = _current.set(attention)
    try:
        yield
    finally:
        _current.reset(token)


def attend(
    layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: AttentionRule
) -> torch.Tensor:
    """Compute the current pass's attention; as `PagedAttention.__call__`."""
    return _current.get()(layer, query, key, value, rule)


def _from_transformers(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attend; queries, keys and values are [1, heads, tokens, dim], the result is [1, tokens, heads, dim]."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    rule = AttentionRule(scale, window=sliding_window, softcap=softcap, sinks=s_aux)
    layer: int = module.layer_idx  # type: ignore[assignment]
    queries, keys, values = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    if is_patched(module, EXPAND):
        return _attend_to_latents(module, layer, queries, keys, values, rule)[None], None
    return attend(layer, queries, keys, values, rule)[None], None


EXPAND: Final = "expand_kv"
"""transformers' method of latent attention that makes each head's keys and values of latents."""


def keep_latents(latents: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Stand for `expand_kv`: leave keys and values as they are cached, one latent and one rotated key per token.

    Args:
        latents: [1, 1, tokens, rank]; rotated: [1, 1, tokens, rotary dim].

    Returns:
        keys [1, 1, tokens, rank + rotary dim], which begin with the values, and values [1, 1, tokens, rank].
    """
    return torch.cat([latents, rotated.to(latents.dtype)], dim=-1), latents


def _attend_to_latents(
    module: Any, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rule: AttentionRule
) -> torch.Tensor:
    """Compute multi-head latent attention over the latents themselves (DeepSeek-V2, arXiv 2405.04434).

    A head's key projection is multiplied into its query, its value projection into its output: the sums equal those of
    the expanded keys and values.

    Args:
        queries: [tokens, heads, dim], the rotated part last; keys and values as of `keep_latents`, [tokens, 1, dim].

    Returns:
        [tokens, heads, value_dim].
    """
    weight = module.kv_b_proj.weight.view(-1, module.qk_nope_head_dim + module.v_head_dim, module.kv_lora_rank)
    of_keys, of_values = weight[:, : module.qk_nope_head_dim], weight[:, module.qk_nope_head_dim :]
    width = module.qk_nope_head_dim
    plain, rotated = queries.transpose(0, 1)[..., :width], queries.transpose(0, 1)[..., width:]
    absorbed = torch.cat([plain @ of_keys, rotated], dim=-1).transpose(0, 1)
    out = attend(layer, absorbed, keys, values, rule)
    found: torch.Tensor = (out.transpose(0, 1) @ of_values.transpose(1, 2)).transpose(0, 1)
    return found


def _nothing_hidden(*args: Any, device: torch.device | None = None, **kwargs: Any) -> torch.Tensor:
    """Return a dummy mask, which our attention ignores."""
    return torch.zeros((1, 1, 1, 1), dtype=torch.bool, device=device)


AttentionInterface.register(NAME, _from_transformers)
AttentionInterface.register(MASKED_NAME, _from_transformers)
AttentionMaskInterface.register(MASKED_NAME, _nothing_hidden)
