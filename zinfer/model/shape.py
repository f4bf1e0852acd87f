"""The widths of a model that decide what a forward takes, read from its transformers config.

Nothing is built and nothing is guessed low: where a config does not say, the widest that its family's habits allow is
taken.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from transformers import DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from zinfer.errors import PlanError

# Activations that torch computes in one operation; the others are written out in Python, with intermediates.
_ONE_OPERATION: Final = frozenset({"relu", "silu", "swish", "gelu", "gelu_pytorch_tanh", "tanh", "sigmoid", "relu6"})
_MLP_WIDTHS: Final = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "d_ff", "d_inner", "hidden_dim")
_DEFAULT_EXPANSION: Final = 4  # GPT-2, BLOOM and others whose config may leave the width of the MLP out
_SHARED_LAYER: Final = "DummyLayer"  # a cache layer that holds nothing: another layer's cache is used, or none


@dataclass(frozen=True)
class Experts:
    """Mixture of experts: every token goes through ``num_per_token`` of ``num_experts``, each ``width`` wide."""

    num_experts: int
    num_per_token: int
    width: int

    @property
    def share(self) -> float:
        """Of the experts' weights, what one token is multiplied with."""
        return self.num_per_token / self.num_experts


@dataclass(frozen=True)
class ModelShape:
    """Widths in elements.

    Attributes:
        hidden: of the residual stream.
        num_heads: of the queries.
        query: of the queries of all heads, the values' where those are wider.
        cached: of what one token leaves in one layer's cache, keys and values together.
        expanded: of keys and values as the attention reads them, one for each query head.
        mlp: of the MLP's middle.
        mlp_copies: tensors of that width alive at once.
        vocab: number of logits.
        windows: for each layer with a cache of its own, the tokens it holds at most; None without a limit.
        is_eager: whether attention computes its scores as tensors, [rows, heads, queries, keys].
        is_uneven: whether keys and values differ in width; torch's sdpa has no fused kernel for that on the CPU.
        experts: None for a dense model.
        rotated: of queries and keys that are turned by their positions.
        has_rms_norms: whether norms are root mean squares, which transformers writes out in Python.
        is_fused: whether fused kernels stand where it writes out norms, rotations and gates.
    """

    hidden: int
    num_heads: int
    query: int
    cached: int
    expanded: int
    mlp: int
    mlp_copies: int
    vocab: int
    windows: tuple[int | None, ...]
    is_eager: bool
    is_uneven: bool
    experts: Experts | None
    rotated: int = 0
    has_rms_norms: bool = False
    is_fused: bool = False


def is_generating_decoder(model: PreTrainedModel) -> bool:
    """Whether it is of the one kind whose memory and seconds beside the weights are known here."""
    return bool(model.can_generate()) and not model.config.is_encoder_decoder


def shape_of(model: PreTrainedModel) -> ModelShape:
    """The shape of a model that generates with a decoder alone.

    Raises:
        PlanError: it is another kind of model, or as `read_shape`.
    """
    if not is_generating_decoder(model):
        raise PlanError(
            f"what a {type(model).__name__} takes beside its weights is not known here, only what decoders take that "
            f"generate; state zinfer.max_device_memory in place of a batch, and time a run"
        )
    return read_shape(model.config)


def read_shape(config: PretrainedConfig) -> ModelShape:
    """The shape of the decoder that a config describes.

    Args:
        config: of a built model, so that it says which attention transformers chose (`_attn_implementation`); without
            that the eager one is counted, which takes the most.

    Raises:
        PlanError: the model keeps a state other than keys and values, whose size is not known here.
    """
    text = config.get_text_config(decoder=True)
    return _read(text, int(text.vocab_size), _windows(text))


def read_encoder_shape(config: PretrainedConfig) -> ModelShape:
    """The shape of the encoder that a config describes, or of a decoder without its head: no logits and no cache.

    Args:
        config: as for `read_shape`.

    Raises:
        PlanError: it does not say how wide the model is.
    """
    text = config.get_text_config(encoder=True)
    if not _widest(text, "hidden_size") or not _widest(text, "num_attention_heads"):
        raise PlanError(f"the config of a {text.model_type} model states no hidden_size or no num_attention_heads")
    return _read(text, 0, (None,))


def _read(text: PretrainedConfig, vocab: int, windows: tuple[int | None, ...]) -> ModelShape:
    hidden, num_heads = int(text.hidden_size), _widest(text, "num_attention_heads")
    query, cached, expanded = _attention_widths(text, hidden, num_heads)
    activation = _first(text, "hidden_act", "hidden_activation", "activation_function")
    return ModelShape(
        hidden=hidden,
        num_heads=num_heads,
        query=query,
        cached=cached,
        expanded=expanded,
        mlp=_widest(text, *_MLP_WIDTHS) or _DEFAULT_EXPANSION * hidden,
        # Gated: activation, gate and product. Written out in Python: an input and four intermediates (NewGELU).
        mlp_copies=3 if activation in _ONE_OPERATION else 5,
        vocab=vocab,
        windows=windows,
        is_eager=getattr(text, "_attn_implementation", None) != "sdpa",
        is_uneven=bool(getattr(text, "kv_lora_rank", None)) and text.v_head_dim != _mla_key(text),
        experts=_experts(text),
        rotated=query + cached // 2 if _first(text, "rope_parameters", "rope_theta", "rotary_dim") else 0,
        has_rms_norms=_first(text, "rms_norm_eps") is not None,
    )


def _attention_widths(text: PretrainedConfig, hidden: int, num_heads: int) -> tuple[int, int, int]:
    """``query``, ``cached`` and ``expanded`` of a `ModelShape`."""
    if getattr(text, "kv_lora_rank", None):  # multi-head latent attention caches the latents (modeling_deepseek_v3.py)
        key = _mla_key(text)
        # Both in one tensor, keys joined with their rotated part, values copied to be contiguous; queries joined too.
        expanded = num_heads * (text.qk_nope_head_dim + key + 2 * text.v_head_dim)
        return 2 * num_heads * max(key, text.v_head_dim), text.kv_lora_rank + text.qk_rope_head_dim, expanded
    head_dim = _widest(text, "head_dim") or hidden // num_heads
    num_kv_heads = _widest(text, "num_key_value_heads") or num_heads
    if getattr(text, "multi_query", False) and text.model_type == "gpt_bigcode":
        num_kv_heads = 1
    return num_heads * head_dim, 2 * num_kv_heads * head_dim, 2 * num_heads * head_dim


def _mla_key(text: PretrainedConfig) -> int:
    return int(text.qk_nope_head_dim + text.qk_rope_head_dim)


def _windows(text: PretrainedConfig) -> tuple[int | None, ...]:
    """Tokens that each layer of transformers' own cache holds at most; asked of the cache that `generate` makes."""
    layers = DynamicCache(config=text).layers
    kinds = {type(layer) for layer in layers} - {DynamicLayer, DynamicSlidingWindowLayer}
    unknown = sorted(kind.__name__ for kind in kinds if kind.__name__ != _SHARED_LAYER)
    if unknown:
        raise PlanError(
            f"a {text.model_type} model keeps {', '.join(unknown)} in its cache; only the memory of keys and values "
            f"can be planned"
        )
    own = [layer for layer in layers if type(layer).__name__ != _SHARED_LAYER]
    return tuple(int(layer.sliding_window) if isinstance(layer, DynamicSlidingWindowLayer) else None for layer in own)


def _experts(text: PretrainedConfig) -> Experts | None:
    num_experts = _widest(text, "num_local_experts", "num_experts", "n_routed_experts")
    num_per_token = _widest(text, "num_experts_per_tok")
    if not num_experts or not num_per_token:
        return None
    return Experts(
        num_experts, num_per_token, _widest(text, "moe_intermediate_size") or _widest(text, "intermediate_size")
    )


def _first(text: PretrainedConfig, *names: str) -> Any:
    return next((value for name in names if (value := getattr(text, name, None)) is not None), None)


def _widest(text: PretrainedConfig, *names: str) -> int:
    """The largest of the values that the config states under these names, one or one a layer; 0 if it states none."""
    values = [getattr(text, name, None) for name in names]
    flat = [item for value in values for item in (value if isinstance(value, Iterable) else [value])]
    return max((int(item) for item in flat if item), default=0)
