"""`ModelSpec`: the widths that memory and time follow from, read from a model's transformers config.

No module is built, and sizes are never underestimated: a value that the config does not state is taken as the largest
usual in its family. Imports no torch: the spec of a published model is stored.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from zinfer.errors import ConfigError, PlanError

if TYPE_CHECKING:  # the spec of a published model is stored, and used without both
    import torch
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel

    from zinfer.model.sharding.cut import Shard

# Activations that torch computes in one operation; the others are written out in Python, with intermediates.
_ONE_OPERATION: Final = frozenset({"relu", "silu", "swish", "gelu", "gelu_pytorch_tanh", "tanh", "sigmoid", "relu6"})
_MLP_WIDTHS: Final = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "d_ff", "d_inner", "hidden_dim")
_DEFAULT_EXPANSION: Final = 4  # GPT-2, BLOOM and others, whose config may omit the width of the MLP
_INDEXED: Final = ("update_indexer", "update_index")  # methods of cache layers that hold an index's keys beside theirs
_SHARED_LAYER: Final = "DummyLayer"  # a cache layer that holds nothing: another layer's cache is used, or none
# Families whose attention uses a window; configs of others may state one that is ignored.
_WINDOWED: Final = frozenset(
    ("gemma2", "gemma3_text", "gpt_oss", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "starcoder2")
)
_SCALE_BYTES: Final = 4  # of a head's keys, and of its values, if they are quantized
_MOST_PAGE_SLOTS: Final = 3  # one computes, one fills, and one is copied back to host memory


@dataclass(frozen=True)
class Experts:
    """Mixture of experts: every token goes through ``num_per_token`` of ``num_experts``, each ``width`` wide."""

    num_experts: int
    num_per_token: int
    width: int

    @property
    def share(self) -> float:
        """Share of the experts' weights that one token is multiplied with."""
        return self.num_per_token / self.num_experts


@dataclass(frozen=True)
class KVShape:
    """The shape of one token's keys and values in the pages of each layer.

    Attributes:
        num_layers: layers with a cache of their own.
        num_heads: of keys and values.
        key_dim: width of a head's key.
        value_dim: width of a head's value.
        values_in_keys: values are the first columns of keys, without memory of their own.
    """

    num_layers: int
    num_heads: int
    key_dim: int
    value_dim: int
    values_in_keys: bool = False

    @property
    def num_page_slots(self) -> int:
        """Number of device slots for pages in host memory, each as large as a layer's pages."""
        return min(_MOST_PAGE_SLOTS, self.num_layers)

    def token_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of one token in all layers, for a dtype of pages."""
        widths = [self.key_dim] if self.values_in_keys else [self.key_dim, self.value_dim]
        scale_bytes = _SCALE_BYTES if dtype.itemsize == 1 else 0
        return self.num_layers * self.num_heads * sum(width * dtype.itemsize + scale_bytes for width in widths)


@dataclass(frozen=True)
class ModelSpec:
    """Widths of a model, in elements per token, and other facts that decide the cost of a forward.

    Attributes:
        model_type: the family, as config.json names it.
        hidden: width of the residual stream.
        num_heads: query heads.
        query: width of the queries of all heads, or of the values if those are wider.
        cached: width of one token's keys and values together in one layer of transformers' own cache.
        expanded: width of keys and values repeated for each query head, as attention reads them.
        mlp: width inside the MLP.
        mlp_copies: tensors of that width alive at once.
        vocab: number of logits.
        windows: for each layer with a cache of its own, the most tokens in transformers' cache; None without a limit.
        is_eager: whether attention computes its scores as tensors, [rows, heads, queries, keys].
        is_uneven: whether keys and values differ in width; torch's sdpa has no fused kernel for that on the CPU.
        experts: None for a dense model.
        kv: shape of one token's keys and values in pages.
        rotated: width of the queries and keys with rotary positions.
        has_rms_norms: whether norms are RMS norms, which transformers computes by several operations in Python.
        is_fused: whether fused kernels replace norms, rotations and gates that transformers computes in Python.
        is_paged: whether attention reads keys and values from pages.
    """

    model_type: str
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
    kv: KVShape
    rotated: int = 0
    has_rms_norms: bool = False
    is_fused: bool = False
    is_paged: bool = False

    @classmethod
    def of(cls, model: PreTrainedModel) -> ModelSpec:
        """Read the spec of a decoder-only model that generates.

        Raises:
            PlanError: it is another kind of model, or as `read`.
        """
        if not is_generating_decoder(model):
            raise PlanError(
                f"what a {type(model).__name__} takes beside its weights is not known here, only what decoders take "
                f"that generate; state zinfer.max_weight_memory in place of a batch, and time a run"
            )
        return cls.read(model.config)

    @classmethod
    def read(cls, config: PretrainedConfig) -> ModelSpec:
        """Read the decoder that a config describes.

        Args:
            config: of a built model, so that it states transformers' attention (`_attn_implementation`); without it
                eager attention is assumed, which takes the most memory.

        Raises:
            PlanError: the model keeps a state other than keys and values, whose size is not known; or the config does
            not state the widths of attention as others do.
        """
        with _naming_config(config):
            text = config.get_text_config(decoder=True)
            return _read(text, int(text.vocab_size), _windows(text))

    @classmethod
    def read_encoder(cls, config: PretrainedConfig) -> ModelSpec:
        """Read the encoder that a config describes, or a decoder without its head: no logits and no cache.

        Args:
            config: as for `read`.

        Raises:
            PlanError: it does not state the model's width.
        """
        with _naming_config(config):
            text = config.get_text_config(encoder=True)
            return _read(text, 0, (None,))

    @classmethod
    def of_document(cls, document: Mapping[str, Any]) -> ModelSpec:
        """Return the spec of `as_document`."""
        experts = document["experts"]
        own = {
            "windows": tuple(document["windows"]),
            "experts": None if experts is None else Experts(**experts),
            "kv": KVShape(**document["kv"]),
        }
        return cls(**{**document, **own})

    def as_document(self) -> dict[str, Any]:
        """Return the spec as JSON."""
        document: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return document

    @property
    def attention_windows(self) -> tuple[int | None, ...]:
        """For each layer the positions that a token attends to, its own included; None: all before it."""
        return self.windows if self.model_type in _WINDOWED else (None,) * len(self.windows)

    @property
    def common_window(self) -> int | None:
        """The widest of the layers' attention windows; None if a layer has none."""
        return common_window(self.attention_windows)

    def over_pages(self) -> ModelSpec:
        """Return the spec for paged attention: no score tensors, and in latent attention no keys and values per head.

        Queries and outputs of latent attention are then as wide as latents, which exist twice: alone, and joined with
        the rotated part.
        """
        paged = replace(self, is_eager=False, is_uneven=False, is_paged=True)
        if not self.kv.values_in_keys:
            return paged
        return replace(paged, expanded=self.num_heads * (self.kv.key_dim + 2 * self.kv.value_dim))


def common_window(windows: Iterable[int | None]) -> int | None:
    """Return the widest of attention windows; None if one is unlimited, or there are none."""
    known = list(windows)
    return max((window for window in known if window is not None), default=None) if all(known) else None


def is_generating_decoder(model: PreTrainedModel) -> bool:
    """Whether the model is a decoder-only one that generates, whose memory and time can be planned."""
    return bool(model.can_generate()) and not model.config.is_encoder_decoder


@contextmanager
def _naming_config(config: PretrainedConfig) -> Iterator[None]:
    """Raise a PlanError that names the model's type for a config that lacks what `_read` asks of it."""
    try:
        yield
    except PlanError:
        raise
    except Exception as error:  # configs lack widths, or vary them, each in its own way
        said = " ".join(f"{error}".split())
        raise PlanError(
            f"the config of a {config.model_type} model does not state its widths as those of other models do "
            f"({type(error).__name__}: {said:.150}), so what it takes beside its weights is not known"
        ) from error


def _read(text: PretrainedConfig, vocab: int, windows: tuple[int | None, ...]) -> ModelSpec:
    hidden, num_heads = _widest(text, "hidden_size"), _widest(text, "num_attention_heads")
    if not hidden or not num_heads:
        raise PlanError(
            f"the config of a {text.model_type} model states no hidden_size or no num_attention_heads; only the memory "
            "of attention can be planned"
        )
    is_latent = bool(getattr(text, "kv_lora_rank", None))
    read_attention = _latent_attention if is_latent else _attention
    query, cached, expanded, kv = read_attention(text, hidden, num_heads, len(windows))
    cached += _widest(text, "index_head_dim")
    activation = _first(text, "hidden_act", "hidden_activation", "activation_function")
    return ModelSpec(
        model_type=text.model_type,
        hidden=hidden,
        num_heads=num_heads,
        query=query,
        cached=cached,
        expanded=expanded,
        mlp=_widest(text, *_MLP_WIDTHS) or _DEFAULT_EXPANSION * hidden,
        # Gated: activation, gate and product. Computed in Python: an input and four intermediates (NewGELU).
        mlp_copies=3 if activation in _ONE_OPERATION else 5,
        vocab=vocab,
        windows=windows,
        is_eager=getattr(text, "_attn_implementation", None) != "sdpa",
        is_uneven=is_latent and text.v_head_dim != _latent_key(text),
        experts=_experts(text),
        kv=kv,
        rotated=query + cached // 2 if _first(text, "rope_parameters", "rope_theta", "rotary_dim") else 0,
        has_rms_norms=_first(text, "rms_norm_eps") is not None,
    )


_AttentionWidths = tuple[int, int, int, KVShape]
"""``query``, ``cached``, ``expanded`` and ``kv`` of a `ModelSpec`."""


def _attention(text: PretrainedConfig, hidden: int, num_heads: int, num_layers: int) -> _AttentionWidths:
    head_dim = _widest(text, "head_dim") or hidden // num_heads
    num_kv_heads = num_paged = _widest(text, "num_key_value_heads") or num_heads
    if getattr(text, "multi_query", False) and text.model_type == "gpt_bigcode":
        num_kv_heads = num_paged = 1
    elif text.model_type == "falcon":
        # Its config states the number for one of three layouts; transformers' cache may hold a copy for every head.
        several = int(text.num_kv_heads) if text.new_decoder_architecture else num_heads
        num_paged = 1 if text.multi_query and not text.new_decoder_architecture else several
    elif text.model_type == "jetmoe":  # repeats keys for each of a token's experts
        num_paged = num_heads
    value_dim = _widest(text, "v_head_dim") or head_dim
    kv = KVShape(num_layers, num_paged, head_dim, value_dim)
    both = head_dim + value_dim
    return num_heads * max(head_dim, value_dim), num_kv_heads * both, num_heads * both, kv


def _latent_attention(text: PretrainedConfig, hidden: int, num_heads: int, num_layers: int) -> _AttentionWidths:
    """Multi-head latent attention: one latent for all heads, followed by the rotated part of the keys."""
    key, cached = _latent_key(text), int(text.kv_lora_rank + text.qk_rope_head_dim)
    # Both in one tensor, keys joined with their rotated part, values copied to be contiguous; queries joined too
    # (modeling_deepseek_v3.py).
    expanded = num_heads * (text.qk_nope_head_dim + key + 2 * text.v_head_dim)
    kv = KVShape(num_layers, 1, cached, text.kv_lora_rank, values_in_keys=True)
    return 2 * num_heads * max(key, text.v_head_dim), cached, expanded, kv


def _latent_key(text: PretrainedConfig) -> int:
    return int(text.qk_nope_head_dim + text.qk_rope_head_dim)


def _windows(text: PretrainedConfig) -> tuple[int | None, ...]:
    """Return the most tokens in each layer of transformers' own cache, read from the cache that `generate` makes."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    layers = DynamicCache(config=text).layers
    kinds = {type(layer) for layer in layers} - {DynamicLayer, DynamicSlidingWindowLayer}
    kinds = {kind for kind in kinds if not any(hasattr(kind, name) for name in _INDEXED)}
    unknown = sorted(kind.__name__ for kind in kinds if kind.__name__ != _SHARED_LAYER)
    if unknown:
        raise PlanError(
            f"a {text.model_type} model keeps {', '.join(unknown)} in its cache; only the memory of keys and values "
            f"can be planned"
        )
    own = [layer for layer in layers if type(layer).__name__ != _SHARED_LAYER]
    return tuple(int(layer.sliding_window) if isinstance(layer, DynamicSlidingWindowLayer) else None for layer in own)


def count_experts(text: PretrainedConfig) -> int:
    """Return the number of experts that a router chooses from; 0 for a dense model."""
    return _widest(text, "num_local_experts", "num_experts", "n_routed_experts")


def _experts(text: PretrainedConfig) -> Experts | None:
    num_experts = count_experts(text)
    num_per_token = _widest(text, "num_experts_per_tok")
    if not num_experts or not num_per_token:
        return None
    return Experts(
        num_experts, num_per_token, _widest(text, "moe_intermediate_size") or _widest(text, "intermediate_size")
    )


def _layer_configs(text: PretrainedConfig) -> Sequence[PretrainedConfig]:
    """Return the config of each layer where they differ (Gemma 4's head_dim), else the one of all."""
    return list(text.per_layer_config) if getattr(text, "is_heterogeneous", False) else [text]


def _first(text: PretrainedConfig, *names: str) -> Any:
    layer = _layer_configs(text)[0]
    return next((value for name in names if (value := getattr(layer, name, None)) is not None), None)


def _widest(text: PretrainedConfig, *names: str) -> int:
    """Return the largest value under these names, each a number or one per layer; 0 if there is none."""
    values = [getattr(layer, name, None) for layer in _layer_configs(text) for name in names]
    flat = [item for value in values for item in (value if isinstance(value, Iterable) else [value])]
    return max((int(item) for item in flat if item), default=0)


def check_num_experts(model: nn.Module, num_experts: int | None) -> None:
    """Raise ConfigError if the model has another number of experts than ``num_experts``; None: not stated."""
    config: Any = getattr(model, "config", None)
    if num_experts is None:
        return
    found = count_experts(config.get_text_config()) if hasattr(config, "get_text_config") else 0
    if found != num_experts:
        has = f"{found} experts" if found else "no experts"
        raise ConfigError(
            f"moe.moe_experts is {num_experts}, but a {type(model).__name__} has {has} in each mixture; correct it, or "
            "leave it out"
        )


def check_ranks(num_experts: int, shard: Shard, holder: str) -> None:
    """Raise ConfigError if more ranks are to divide experts than there are; ``holder`` names what has them."""
    groups = shard.by_number
    if num_experts < groups.size:
        raise ConfigError(
            f"{groups.key} (ep_size) = {groups.size} is more than the {num_experts} experts of {holder}; divide them "
            f"among {num_experts} ranks at most, and let further ones be replicas (zinfer.parallel.replicas)"
        )
