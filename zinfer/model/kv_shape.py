"""What one token leaves in the cache of a model: read from its transformers config."""

from dataclasses import dataclass
from typing import Any, Final

import torch
from transformers import PretrainedConfig

from zinfer.kernels.kv_pages import KV_CODES

_SCALE_BYTES = 4  # of a head's keys, and of its values, where they are codes
_MOST_SLOTS: Final = 3  # one computes, one fills, and one waits for what it holds to be back in host memory


@dataclass(frozen=True)
class KVShape:
    """Keys and values of a token in each layer.

    Attributes:
        num_layers: layers with a cache of their own.
        num_heads: of keys and values.
        key_dim: width of a head's key.
        value_dim: width of a head's value.
        values_in_keys: values are the first columns of keys, and take no memory of their own.
    """

    num_layers: int
    num_heads: int
    key_dim: int
    value_dim: int
    values_in_keys: bool = False

    def token_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one token in all layers, in a dtype that pages have."""
        widths = [self.key_dim] if self.values_in_keys else [self.key_dim, self.value_dim]
        scale_bytes = _SCALE_BYTES if dtype in KV_CODES else 0
        return self.num_layers * self.num_heads * sum(width * dtype.itemsize + scale_bytes for width in widths)


def num_page_slots(num_layers: int) -> int:
    """Slots on the device that pages pass through which are at home elsewhere, each as large as a layer's pages."""
    return min(_MOST_SLOTS, num_layers)


def read_kv_shape(config: PretrainedConfig) -> KVShape:
    """The shape of a decoder's cache."""
    text: Any = config.get_text_config(decoder=True)
    num_heads = int(text.num_attention_heads)
    if getattr(text, "kv_lora_rank", None):  # the latents, one for all heads, and behind them the turned part of keys
        width = text.kv_lora_rank + text.qk_rope_head_dim
        return KVShape(text.num_hidden_layers, 1, width, text.kv_lora_rank, values_in_keys=True)
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // num_heads
    return KVShape(int(text.num_hidden_layers), _num_kv_heads(text), int(head_dim), int(head_dim))


def _num_kv_heads(text: Any) -> int:
    num_heads = int(text.num_attention_heads)
    if text.model_type == "falcon":  # the number that its config states holds for one of its three layouts
        return int(text.num_kv_heads) if text.new_decoder_architecture else 1 if text.multi_query else num_heads
    return int(getattr(text, "num_key_value_heads", None) or num_heads)
