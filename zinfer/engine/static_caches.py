"""Static KV caches for `generate`, at fixed addresses and reused from call to call."""

from collections.abc import Mapping
from typing import Any, Final

from transformers import PreTrainedModel
from transformers.cache_utils import Cache, EncoderDecoderCache, StaticCache, StaticLayer, StaticSlidingWindowLayer

from zinfer.graphs.forward_graphs import ForwardGraphs
from zinfer.graphs.static_layer import FusedStaticLayer
from zinfer.model.module_patches import ModulePatches

_MOST_CACHES: Final = 4
_LENGTH_STEP: Final = 256
"""Lengths are rounded up to multiples of this, so that calls share graphs."""
_MAKE: Final = "_prepare_static_cache"
# Arguments of `generate` that reorder, crop, return or replace the KV cache.
_UNSUITED: Final = (
    *("past_key_values", "cache_implementation", "assistant_model", "prompt_lookup_num_tokens", "custom_generate"),
    *("penalty_alpha", "dola_layers", "return_dict_in_generate", "prefill_chunk_size", "assistant_early_exit"),
)


class StaticCaches:
    """Makes a model's `generate` use static KV caches if graphs can replay its forwards.

    Args:
        model: its `_prepare_static_cache` is patched while it generates.
        graphs: of its forward.
    """

    def __init__(self, model: PreTrainedModel, graphs: ForwardGraphs) -> None:
        self._model = model
        self._graphs = graphs
        self._caches: list[tuple[tuple[int, ...], Cache]] = []
        """By shape, the one used last at the end."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's own `generate`, with a static KV cache unless the arguments rule it out."""
        if reason := self._unsuited(kwargs):
            self._graphs.counts.eager[reason] += 1
            return self._model.generate(*args, **kwargs)
        patches = ModulePatches()
        patches.patch(self._model, self._take, _MAKE)
        try:
            # transformers would compile the forward for static caches.
            return self._model.generate(*args, **kwargs, cache_implementation="static", disable_compile=True)
        finally:
            patches.undo()

    def close(self) -> None:
        """Free all caches, and the graphs that use them; may be called again."""
        self._caches.clear()
        self._graphs.close()

    def _unsuited(self, kwargs: Mapping[str, Any]) -> str:
        config = kwargs.get("generation_config") or self._model.generation_config
        found = {name: kwargs.get(name, getattr(config, name, None)) for name in (*_UNSUITED, "num_beams", "use_cache")}
        if not hasattr(self._model, _MAKE) or not getattr(self._model, "_can_compile_fullgraph", False):
            return "transformers has no static keys and values for this model"
        if (found["num_beams"] or 1) > 1:
            return "generate(num_beams=...) reorders keys and values"
        if found["use_cache"] is False:
            return "generate(use_cache=False) grows its input"
        asked = (name for name in _UNSUITED if found[name] is not None and found[name] is not False)
        return next((f"generate({name}=...)" for name in asked), "")

    def _take(self, *, batch_size: int, max_cache_len: int, **kwargs: Any) -> Cache:
        """Return an empty cache for these rows and tokens: a new one, or one of an earlier call."""
        length = -(-max_cache_len // _LENGTH_STEP) * _LENGTH_STEP
        self._model.__dict__.pop("_previous_max_cache_length", None)  # a long call must not make all later ones long
        make = getattr(type(self._model), _MAKE)
        made = make(self._model, batch_size=batch_size, max_cache_len=length, **kwargs)
        _lay_out(made, length)
        shape = (batch_size, *_lengths(made))
        at = next((place for place, (known, _) in enumerate(self._caches) if known == shape), None)
        if at is not None:
            made = self._caches.pop(at)[1]
            made.reset()
        elif len(self._caches) == _MOST_CACHES:
            self._graphs.forget(self._caches.pop(0)[1])
        self._caches.append((shape, made))
        return made


def _lay_out(cache: Cache, length: int) -> None:
    """Replace self-attention layers by ones that a single kernel writes; cross-attention is written only once.

    Sliding windows become a view of a full cache: transformers' sliding layers are shifted from Python.
    """
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    assert isinstance(cache, StaticCache)
    plain = (StaticLayer, StaticSlidingWindowLayer)
    cache.layers = [FusedStaticLayer(length) if type(layer) in plain else layer for layer in cache.layers]


def _lengths(cache: Cache) -> list[int]:
    if isinstance(cache, EncoderDecoderCache):
        return _lengths(cache.self_attention_cache) + _lengths(cache.cross_attention_cache)
    return [layer.get_max_length() for layer in cache.layers]
