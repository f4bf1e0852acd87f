"""GPT-J: rotary positions over the first dimensions of a head, neighbours paired."""

from typing import Any, Final

import torch
from transformers.models.gptj.modeling_gptj import GPTJAttention, apply_rotary_pos_emb

from zinfer.batching.attention import attend
from zinfer.kernels.attention_rule import AttentionRule

ATTENTION: Final = GPTJAttention


def forward(
    module: GPTJAttention,
    hidden_states: torch.Tensor,
    layer_past: None = None,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """As `GPTJAttention.forward`, over pages: hidden_states [1, tokens, hidden], position_ids [1, tokens]."""
    assert position_ids is not None
    heads = (*hidden_states.shape[:2], module.num_attention_heads, module.head_dim)
    query, key, value = (part(hidden_states).view(heads) for part in (module.q_proj, module.k_proj, module.v_proj))
    angles = module._get_embed_positions(position_ids)[0][position_ids].to(key.dtype)
    sine, cosine = angles.chunk(2, dim=-1)
    width = module.rotary_dim or module.head_dim
    query, key = (
        torch.cat([apply_rotary_pos_emb(part[..., :width], sine, cosine), part[..., width:]], dim=-1)
        for part in (query, key)
    )
    out = attend(module.layer_idx, query[0], key[0], value[0], AttentionRule(1 / module.scale_attn))
    return module.out_proj(out.reshape(1, out.shape[0], -1)), None
