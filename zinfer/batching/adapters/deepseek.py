"""DeepSeek-V2 and V3: multi-head latent attention over the latents themselves (DeepSeek-V2, arXiv 2405.04434).

A token leaves one latent for all heads, and one turned key. What makes a head's keys of latents is multiplied into its
query, what makes its values of them into its output: the sums are those of the expanded keys and values, of which no
page has to hold any.
"""

from typing import Any, Final

import torch
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3

from zinfer.batching.attention import attend
from zinfer.kernels.attention_rule import AttentionRule

V2_ATTENTION: Final = v2.DeepseekV2Attention
V3_ATTENTION: Final = v3.DeepseekV3Attention


def forward_v2(
    module: Any, hidden_states: torch.Tensor, *args: Any, position_embeddings: torch.Tensor, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """As `DeepseekV2Attention.forward`, over pages: hidden_states [1, tokens, hidden]."""
    query, turned_query, latent, turned_key = _parts(module, hidden_states)
    turned = v2.apply_rotary_emb(turned_query, turned_key, position_embeddings.to(turned_query.device))
    return _attend(module, query, latent, *turned), None


def forward_v3(
    module: Any,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    *args: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """As `DeepseekV3Attention.forward`, over pages: hidden_states [1, tokens, hidden]."""
    query, turned_query, latent, turned_key = _parts(module, hidden_states)
    turn = v3.apply_rotary_pos_emb_interleave if module.config.rope_interleave else v3.apply_rotary_pos_emb
    turned = turn(turned_query, turned_key, *position_embeddings)
    return _attend(module, query, latent, *turned), None


def _parts(module: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries [1, heads, tokens, dim] in two parts, latents [1, tokens, rank], keys to turn [1, 1, tokens, dim]."""
    num_tokens = hidden.shape[1]
    if module.q_lora_rank is None:
        query = module.q_proj(hidden)
    else:
        query = module.q_b_proj(module.q_a_layernorm(module.q_a_proj(hidden)))
    query = query.view(1, num_tokens, -1, module.qk_nope_head_dim + module.qk_rope_head_dim).transpose(1, 2)
    plain, turned = query.split([module.qk_nope_head_dim, module.qk_rope_head_dim], dim=-1)
    latent, key = module.kv_a_proj_with_mqa(hidden).split([module.kv_lora_rank, module.qk_rope_head_dim], dim=-1)
    return plain, turned, module.kv_a_layernorm(latent), key.view(1, 1, num_tokens, -1)


def _attend(
    module: Any, query: torch.Tensor, latent: torch.Tensor, turned_query: torch.Tensor, turned_key: torch.Tensor
) -> torch.Tensor:
    """The attention's output [1, tokens, hidden] from what `_parts` gave, the turned parts turned."""
    weight = module.kv_b_proj.weight.view(-1, module.qk_nope_head_dim + module.v_head_dim, module.kv_lora_rank)
    of_keys, of_values = weight.split([module.qk_nope_head_dim, module.v_head_dim], dim=1)
    queries = torch.cat([query[0] @ of_keys, turned_query[0].to(query.dtype)], dim=-1).transpose(0, 1)
    keys = torch.cat([latent[0], turned_key[0, 0].to(latent.dtype)], dim=-1)[:, None]
    out = attend(module.layer_idx, queries, keys, latent[0, :, None], AttentionRule(module.scaling))
    values = out.transpose(0, 1) @ of_values.transpose(1, 2)
    projected: torch.Tensor = module.o_proj(values.transpose(0, 1).reshape(1, out.shape[0], -1))
    return projected
