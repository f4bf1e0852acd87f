"""Paged attention for modules that do not use transformers' attention interface, or whose pages hold latents."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.bloom.modeling_bloom import BloomAttention
from transformers.models.falcon.modeling_falcon import FalconAttention
from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb as rotate_falcon
from transformers.models.gptj import modeling_gptj as gptj
from transformers.models.mpt.modeling_mpt import MptAttention

from zinfer.batching.attention import EXPAND, attend, keep_latents
from zinfer.kernels.attention_arguments import AttentionRule
from zinfer.model.module_patches import ModulePatches
from zinfer.model.sharding.heads import head_range


def patch_attention(model: PreTrainedModel, patches: ModulePatches) -> bool:
    """Patch the attention modules that do not use transformers' interface, expand latents, or choose keys by an index.

    An index chooses some of more keys than it keeps. Requests are limited to fewer (`check_family`): none is computed.

    Returns:
        whether the model's code requires a mask.
    """
    needs_mask = False
    for module in model.modules():
        forward = next((own for kind, own in _OWN.items() if isinstance(module, kind)), None)
        needs_mask |= isinstance(module, _MASKED)
        if forward is not None:
            patches.patch(module, partial(forward, module))
        elif isinstance(getattr(module, "kv_b_proj", None), nn.Module) and hasattr(module, EXPAND):
            patches.patch(module, keep_latents, EXPAND)
        if isinstance(indexer := getattr(module, "indexer", None), nn.Module):
            patches.patch(indexer, _choose_none)
            needs_mask = True
    return needs_mask


def _choose_none(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Stand for an index: [1, tokens, 0]; paged attention ignores it."""
    return hidden_states.new_empty((*hidden_states.shape[:2], 0), dtype=torch.long)


def _alibi_slopes(module: BloomAttention | FalconAttention, device: torch.device) -> torch.Tensor:
    """Return the slopes of ALiBi (Press et al. 2022, "Train short, test long") for the heads of an attention.

    [heads] float32: powers of one base for the largest power of two of heads, and of a finer base for the rest. The
    heads of one rank have the slopes that they have among those of all ranks.
    """
    first, num_heads = head_range(module, module.num_heads)
    whole = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * (head + 1) / whole) for head in range(whole)]
    slopes += [2 ** (-4 * (2 * head + 1) / whole) for head in range(num_heads - whole)]
    return torch.tensor(slopes[first : first + module.num_heads], dtype=torch.float32, device=device)


def _bloom(
    module: BloomAttention, hidden_states: torch.Tensor, residual: torch.Tensor, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """As `BloomAttention.forward`, over pages: hidden_states and residual [1, tokens, hidden].

    One matrix computes queries, keys and values, interleaved by heads.
    """
    tokens = hidden_states.shape[1]
    fused = module.query_key_value(hidden_states).view(tokens, module.num_heads, 3, module.head_dim)
    slopes = _alibi_slopes(module, hidden_states.device)
    rule = AttentionRule(module.inv_norm_factor, alibi_slopes=slopes)
    out = attend(module.layer_idx, fused[:, :, 0], fused[:, :, 1], fused[:, :, 2], rule)
    return module.dense(out.reshape(1, tokens, -1)) + residual, None


def _falcon(
    module: FalconAttention,
    hidden_states: torch.Tensor,
    alibi: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """As `FalconAttention.forward`, over pages: hidden_states [1, tokens, hidden].

    The fused matrix has one of three layouts; ALiBi is scaled like the products, unlike BLOOM's.
    transformers rounds ALiBi's biases to bfloat16, which differs from ours for positions of more than 8 bits.
    """
    query, key, value = _split_falcon(module, module.query_key_value(hidden_states)[0])
    slopes = None
    if alibi is None:
        assert position_embeddings is not None
        rotated = rotate_falcon(query.transpose(0, 1)[None], key.transpose(0, 1)[None], *position_embeddings)
        query, key = (part[0].transpose(0, 1) for part in rotated)
    else:
        slopes = _alibi_slopes(module, hidden_states.device) * module.inv_norm_factor
    out = attend(module.layer_idx, query, key, value, AttentionRule(module.inv_norm_factor, alibi_slopes=slopes))
    return module.dense(out.reshape(1, out.shape[0], -1)), None


def _split_falcon(module: FalconAttention, fused: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries, keys and values [tokens, heads, head_dim]; keys and values once per group of query heads."""
    tokens, dim = fused.shape[0], module.head_dim
    if module.new_decoder_architecture:
        grouped = fused.view(tokens, module.num_kv_heads, -1, dim)
        return grouped[:, :, :-2].flatten(1, 2), grouped[:, :, -2], grouped[:, :, -1]
    if module.multi_query:
        heads = fused.view(tokens, module.num_heads + 2, dim)
        return heads[:, :-2], heads[:, -2:-1], heads[:, -1:]
    interleaved = fused.view(tokens, module.num_heads, 3, dim)
    return interleaved[:, :, 0], interleaved[:, :, 1], interleaved[:, :, 2]


def _gptj(
    module: gptj.GPTJAttention,
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
        torch.cat([gptj.apply_rotary_pos_emb(part[..., :width], sine, cosine), part[..., width:]], dim=-1)
        for part in (query, key)
    )
    out = attend(module.layer_idx, query[0], key[0], value[0], AttentionRule(1 / module.scale_attn))
    return module.out_proj(out.reshape(1, out.shape[0], -1)), None


def _mpt(
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


_OWN: Final[dict[type[nn.Module], Callable[..., Any]]] = {
    BloomAttention: _bloom,
    FalconAttention: _falcon,
    gptj.GPTJAttention: _gptj,
    MptAttention: _mpt,
}
_MASKED: Final = (MptAttention,)
"""Attention whose code requires a mask, as that of indexers does."""
