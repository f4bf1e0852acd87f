"""MPT: one matrix for queries, keys and values, clipped if the config says so, and ALiBi with a base of its own."""

from typing import Any, Final

import torch
from transformers.models.mpt.modeling_mpt import MptAttention

from zinfer.batching.attention import attend
from zinfer.kernels.attention_rule import AttentionRule

ATTENTION: Final = MptAttention


def forward(
    module: MptAttention, hidden_states: torch.Tensor, position_bias: torch.Tensor, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """As `MptAttention.forward`, over pages: hidden_states [1, tokens, hidden].

    position_bias: [heads, 1, positions], falling by a head's slope from 0 at the last one.
    """
    fused = module.Wqkv(hidden_states)
    if module.clip_qkv:
        fused = fused.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    query, key, value = fused.view(-1, 3, module.n_heads, module.head_dim).unbind(1)
    slopes = position_bias[:, 0, -1] - position_bias[:, 0, -2]
    out = attend(module.layer_idx, query, key, value, AttentionRule(module.softmax_scale, alibi_slopes=slopes))
    return module.out_proj(out.reshape(1, out.shape[0], -1)), None
