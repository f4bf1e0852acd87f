"""BLOOM: one matrix for queries, keys and values, interleaved by heads, and ALiBi."""

from typing import Any, Final

import torch
from transformers.models.bloom.modeling_bloom import BloomAttention

from zinfer.batching.adapters.alibi import alibi_slopes
from zinfer.batching.attention import attend
from zinfer.kernels.attention_rule import AttentionRule

ATTENTION: Final = BloomAttention


def forward(
    module: BloomAttention, hidden_states: torch.Tensor, residual: torch.Tensor, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """As `BloomAttention.forward`, over pages: hidden_states and residual [1, tokens, hidden]."""
    tokens = hidden_states.shape[1]
    fused = module.query_key_value(hidden_states).view(tokens, module.num_heads, 3, module.head_dim)
    slopes = alibi_slopes(module.num_heads, hidden_states.device)
    rule = AttentionRule(module.inv_norm_factor, alibi_slopes=slopes)
    out = attend(module.layer_idx, fused[:, :, 0], fused[:, :, 1], fused[:, :, 2], rule)
    return module.dense(out.reshape(1, tokens, -1)) + residual, None
