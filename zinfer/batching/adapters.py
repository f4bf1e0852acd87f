"""Paged attention forwards for families that do not use transformers' attention interface, or cache latents."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.bloom.modeling_bloom import BloomAttention
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3
from transformers.models.falcon.modeling_falcon import FalconAttention
from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb as rotate_falcon
from transformers.models.gptj import modeling_gptj as gptj
from transformers.models.mpt.modeling_mpt import MptAttention

from zinfer.batching.attention import attend
from zinfer.kernels.attention_arguments import AttentionRule
from zinfer.model.families import ADAPTED, check_family
from zinfer.model.module_patches import ModulePatches
from zinfer.model.sharding.heads import head_range


def patch_attention(model: PreTrainedModel, patches: ModulePatches) -> None:
    """Patch the attention modules of a family that does not use transformers' interface.

    Raises:
        ConfigError: the family cannot run in ragged batches.
    """
    model_type = check_family(model)
    if model_type in _OWN:
        attention, forward = _OWN[model_type]
        modules = [module for module in model.modules() if isinstance(module, attention)]
        assert modules, f"a {model_type} model without a {attention.__name__}"
        for module in modules:
            patches.patch(module, partial(forward, module))


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


def _deepseek_v2(
    module: Any, hidden_states: torch.Tensor, *args: Any, position_embeddings: torch.Tensor, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """As `DeepseekV2Attention.forward`, over pages: hidden_states [1, tokens, hidden]."""
    query, rotary_query, latent, rotary_key = _latent_parts(module, hidden_states)
    rotated = v2.apply_rotary_emb(rotary_query, rotary_key, position_embeddings.to(rotary_query.device))
    return _attend_to_latents(module, query, latent, *rotated), None


def _deepseek_v3(
    module: Any,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    *args: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """As `DeepseekV3Attention.forward`, over pages: hidden_states [1, tokens, hidden]."""
    query, rotary_query, latent, rotary_key = _latent_parts(module, hidden_states)
    rotate = v3.apply_rotary_pos_emb_interleave if module.config.rope_interleave else v3.apply_rotary_pos_emb
    rotated = rotate(rotary_query, rotary_key, *position_embeddings)
    return _attend_to_latents(module, query, latent, *rotated), None


def _latent_parts(module: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the inputs of multi-head latent attention over the latents themselves (DeepSeek-V2, arXiv 2405.04434).

    The cache holds one latent and one rotated key per token, for all heads. A head's key projection is multiplied into
    its query, its value projection into its output: the sums equal those of the expanded keys and values.

    Returns:
        queries [1, heads, tokens, dim] in two parts, latents [1, tokens, rank], keys to rotate [1, 1, tokens, dim].
    """
    num_tokens = hidden.shape[1]
    if module.q_lora_rank is None:
        query = module.q_proj(hidden)
    else:
        query = module.q_b_proj(module.q_a_layernorm(module.q_a_proj(hidden)))
    query = query.view(1, num_tokens, -1, module.qk_nope_head_dim + module.qk_rope_head_dim).transpose(1, 2)
    plain, rotary = query.split([module.qk_nope_head_dim, module.qk_rope_head_dim], dim=-1)
    latent, key = module.kv_a_proj_with_mqa(hidden).split([module.kv_lora_rank, module.qk_rope_head_dim], dim=-1)
    return plain, rotary, module.kv_a_layernorm(latent), key.view(1, 1, num_tokens, -1)


def _attend_to_latents(
    module: Any, query: torch.Tensor, latent: torch.Tensor, rotary_query: torch.Tensor, rotary_key: torch.Tensor
) -> torch.Tensor:
    """Return the attention's output [1, tokens, hidden] from the results of `_latent_parts`, after rotation."""
    weight = module.kv_b_proj.weight.view(-1, module.qk_nope_head_dim + module.v_head_dim, module.kv_lora_rank)
    of_keys, of_values = weight.split([module.qk_nope_head_dim, module.v_head_dim], dim=1)
    queries = torch.cat([query[0] @ of_keys, rotary_query[0].to(query.dtype)], dim=-1).transpose(0, 1)
    keys = torch.cat([latent[0], rotary_key[0, 0].to(latent.dtype)], dim=-1)[:, None]
    out = attend(module.layer_idx, queries, keys, latent[0, :, None], AttentionRule(module.scaling))
    values = out.transpose(0, 1) @ of_values.transpose(1, 2)
    projected: torch.Tensor = module.o_proj(values.transpose(0, 1).reshape(1, out.shape[0], -1))
    return projected


_OWN: Final[dict[str, tuple[type[nn.Module], Callable[..., Any]]]] = {
    "deepseek_v2": (v2.DeepseekV2Attention, _deepseek_v2),
    "deepseek_v3": (v3.DeepseekV3Attention, _deepseek_v3),
    "bloom": (BloomAttention, _bloom),
    "falcon": (FalconAttention, _falcon),
    "gptj": (gptj.GPTJAttention, _gptj),
    "mpt": (MptAttention, _mpt),
}
assert _OWN.keys() == ADAPTED
