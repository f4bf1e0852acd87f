"""Avoids masks and their conversions while a graph is captured.

Masks that hide nothing: transformers omits them, so that attention uses a kernel without a mask. To decide this it
reads the mask's values, which it cannot do during a capture: it then materializes masks, and several kernels per layer
replace one. So the values are read before, as part of the form of a call (`padding_of`, `spared`).

Masks of one token a row: torch converts boolean masks to additive ones in every layer. `float_masks` converts them once
per forward.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from enum import Enum
from typing import Any, Final

import torch
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import masking_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_DECISIONS: Final = ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa")
_ONE_MASK: Final = frozenset(
    ("input_ids", "attention_mask", "token_type_ids", "position_ids", "past_key_values", "use_cache", "logits_to_keep")
)
"""With only these arguments, all padding masks of a forward derive from ``attention_mask``."""
_NAME: Final = "sdpa"
_HIDDEN: Final = -65504.0
"""Makes weights exactly 0 in all dtypes. torch passes -inf to most kernels, and this number to cuDNN's: both have the
same effect in a row with a visible key, and a single token sees itself."""
_capturing = threading.Lock()


class Padding(Enum):
    """What is known about a call's padding."""

    UNKNOWN = "unknown"
    NOT_GIVEN = "not given"
    NONE = "none"


def padding_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Padding:
    """Return what a forward's arguments say about padding, if it has no KV cache yet. Waits for the device."""
    if len(args) > 1 or kwargs.get("past_key_values") is not None:
        return Padding.UNKNOWN
    given = {name for name, value in kwargs.items() if value is not None}
    if not any("mask" in name for name in given):
        return Padding.NOT_GIVEN
    mask = kwargs.get("attention_mask")
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2 or not given <= _ONE_MASK:
        return Padding.UNKNOWN
    return Padding.NONE if bool(mask.all()) else Padding.UNKNOWN


@contextmanager
def spared(padding: Padding) -> Iterator[None]:
    """Within this context and thread, transformers omits masks that are known to hide nothing."""
    with ExitStack() as stack:
        for name in _DECISIONS if padding is not Padding.UNKNOWN else ():
            decide = _deciding(getattr(masking_utils, name), padding, threading.get_ident())
            stack.enter_context(_replaced(name, decide))
        yield


def _deciding(decide: Callable[..., bool], padding: Padding, thread: int) -> Callable[..., bool]:
    def decided(padding_mask: torch.Tensor | None, *args: Any, **kwargs: Any) -> bool:
        is_known = padding_mask is None or padding is Padding.NONE
        if not is_known or threading.get_ident() != thread:
            return decide(padding_mask, *args, **kwargs)
        plain = masking_utils.is_tracing
        with _replaced("is_tracing", lambda *given: threading.get_ident() != thread and plain(*given)):
            return bool(decide(None, *args, **kwargs))

    return decided


@contextmanager
def _replaced(name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Replace a function of transformers' in this context. `_capturing` serializes captures."""
    plain = getattr(masking_utils, name)
    setattr(masking_utils, name, function)
    try:
        yield
    finally:
        setattr(masking_utils, name, plain)


@contextmanager
def float_masks() -> Iterator[Callable[[], None]]:
    """Within this context and thread, attention caches its float masks; yields a function that drops the cache.

    transformers looks the attention function up by the name in a model's config, which some models also compare. So the
    name is kept, and maps to another function.
    """
    with _capturing:
        local = ALL_ATTENTION_FUNCTIONS._local_mapping
        before = local.get(_NAME)
        ALL_ATTENTION_FUNCTIONS[_NAME] = attention = _Attention(ALL_ATTENTION_FUNCTIONS[_NAME])
        try:
            yield attention.forget
        finally:
            if before is None:
                del ALL_ATTENTION_FUNCTIONS[_NAME]
            else:
                ALL_ATTENTION_FUNCTIONS[_NAME] = before


class _Attention:
    """transformers' own attention, ``plain``, with float masks."""

    def __init__(self, plain: Callable[..., Any]) -> None:
        self._plain = plain
        self._thread = threading.get_ident()
        self._made: MutableMapping[torch.Tensor, tuple[int, torch.Tensor]] = WeakTensorKeyDictionary()
        """By mask: its version, and the float mask. Both are freed when their capture ends."""

    def forget(self) -> None:
        """Drop all float masks."""
        self._made.clear()

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        **others: Any,
    ) -> Any:
        # Several tokens may include padding, which sees no key: torch converts these masks. It also converts masks that
        # transformers merges with a bias.
        is_one = query.shape[-2] == 1 and others.get("position_bias") is None
        is_boolean = isinstance(attention_mask, torch.Tensor) and attention_mask.dtype == torch.bool
        if is_one and is_boolean and threading.get_ident() == self._thread:
            attention_mask = self._numbers(attention_mask, query.dtype)
        return self._plain(module, query, key, value, attention_mask, **others)

    def _numbers(self, mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        version = 0 if mask.is_inference() else mask._version
        known = self._made.get(mask)
        if known is None or known[0] != version or known[1].dtype != dtype:
            numbers = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, _HIDDEN)
            known = self._made[mask] = version, numbers
        return known[1]
