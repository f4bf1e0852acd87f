"""Spares masks that hide nothing.

transformers leaves such a mask out, so that an attention kernel without one computes. It looks at the mask's numbers
for that, and cannot while a graph is recorded: it then writes masks out, and several kernels a layer take the place of
the one. So the numbers are looked at before, as part of the form of a call.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch
from transformers import masking_utils

_DECISIONS: Final = ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa")


def hides_nothing(kwargs: Mapping[str, Any]) -> bool:
    """Whether a forward of whole texts, without keys and values from before, is given no padding. Waits for the device.

    Args:
        kwargs: of the forward.
    """
    mask = kwargs.get("attention_mask")
    if kwargs.get("past_key_values") is not None:
        return False
    return mask is None or (isinstance(mask, torch.Tensor) and mask.dim() == 2 and bool(mask.all()))


@contextmanager
def spared() -> Iterator[None]:
    """Within it transformers takes padding masks for such that hide nothing; in all threads."""
    with ExitStack() as stack:
        for name in _DECISIONS:
            stack.enter_context(_replaced(name, _without_padding(getattr(masking_utils, name))))
        yield


def _without_padding(decide: Callable[..., bool]) -> Callable[..., bool]:
    def decided(padding_mask: torch.Tensor | None, *args: Any, **kwargs: Any) -> bool:
        with _replaced("is_tracing", lambda *_: False):
            return bool(decide(None, *args, **kwargs))

    return decided


@contextmanager
def _replaced(name: str, function: Callable[..., Any]) -> Iterator[None]:
    plain = getattr(masking_utils, name)
    setattr(masking_utils, name, function)
    try:
        yield
    finally:
        setattr(masking_utils, name, plain)
