"""Falcon: three layouts of its joined matrix, rotary positions or ALiBi (scaled like the products, unlike BLOOM's)."""

from typing import Any, Final

import torch
from transformers.models.falcon.modeling_falcon import FalconAttention, apply_rotary_pos_emb

from zinfer.batching.adapters.alibi import alibi_slopes
from zinfer.batching.attention import attend
from zinfer.kernels.attention_rule import AttentionRule

ATTENTION: Final = FalconAttention


def forward(
    module: FalconAttention,
    hidden_states: torch.Tensor,
    alibi: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """As `FalconAttention.forward`, over pages: hidden_states [1, tokens, hidden].

    transformers rounds ALiBi's biases to bfloat16, which differs from ours where a position has more than 8 bits.
    """
    query, key, value = _split(module, module.query_key_value(hidden_states)[0])
    slopes = None
    if alibi is None:
        assert position_embeddings is not None
        turned = apply_rotary_pos_emb(query.transpose(0, 1)[None], key.transpose(0, 1)[None], *position_embeddings)
        query, key = (part[0].transpose(0, 1) for part in turned)
    else:
        slopes = alibi_slopes(module.num_heads, hidden_states.device) * module.inv_norm_factor
    out = attend(module.layer_idx, query, key, value, AttentionRule(module.inv_norm_factor, alibi_slopes=slopes))
    return module.dense(out.reshape(1, out.shape[0], -1)), None


def _split(module: FalconAttention, fused: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values [tokens, heads, head_dim]; keys and values once for the heads that share them."""
    tokens, dim = fused.shape[0], module.head_dim
    if module.new_decoder_architecture:
        grouped = fused.view(tokens, module.num_kv_heads, -1, dim)
        return grouped[:, :, :-2].flatten(1, 2), grouped[:, :, -2], grouped[:, :, -1]
    if module.multi_query:
        heads = fused.view(tokens, module.num_heads + 2, dim)
        return heads[:, :-2], heads[:, -2:-1], heads[:, -1:]
    interleaved = fused.view(tokens, module.num_heads, 3, dim)
    return interleaved[:, :, 0], interleaved[:, :, 1], interleaved[:, :, 2]
