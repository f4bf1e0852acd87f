"""Spares masks that hide nothing.

transformers leaves such a mask out, so that an attention kernel without one computes. It looks at the mask's numbers
for that, and cannot while a graph is captured: it then writes masks out, and several kernels a layer take the place of
the one. So the numbers are looked at before, as part of the form of a call.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from enum import Enum
from typing import Any, Final

import torch
from transformers import masking_utils

_DECISIONS: Final = ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa")
_ONE_MASK: Final = frozenset(
    ("input_ids", "attention_mask", "token_type_ids", "position_ids", "past_key_values", "use_cache", "logits_to_keep")
)
"""Arguments beside which ``attention_mask`` is what all padding masks of a forward are made of."""


class Padding(Enum):
    """What is known of a call's padding."""

    UNKNOWN = "unknown"
    NOT_GIVEN = "not given"
    NONE = "none"


def padding_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Padding:
    """What the arguments of a forward say, of whole prompts without earlier keys and values. Waits for the device."""
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
    """Within it, and in this thread, transformers leaves masks out that hide nothing, as far as that is known."""
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
    """Captures come one after the other (`float_masks`), so that what is put back is transformers' own."""
    plain = getattr(masking_utils, name)
    setattr(masking_utils, name, function)
    try:
        yield
    finally:
        setattr(masking_utils, name, plain)
