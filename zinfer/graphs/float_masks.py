"""Masks of one token a row as numbers to add, made once a forward: torch makes them of boolean ones in every layer."""

import threading
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any, Final, TypeGuard

import torch
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_NAME: Final = "sdpa"
_HIDDEN: Final = -65504.0
"""Weights become exactly 0 with it in all dtypes. torch gives -inf to most kernels, and this to cuDNN's: both mean the
same to a row that sees anything, and a single token sees itself."""
_capturing = threading.Lock()


@contextmanager
def float_masks() -> Iterator[Callable[[], None]]:
    """Let attention that runs inside, in this thread, take the numbers of masks that it has seen before.

    What it yields lets them be forgotten.

    transformers looks the function up by the name in a model's config. Some models ask for that name themselves: so it
    stays, and stands for another function meanwhile.
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
    """transformers' own, with masks as numbers.

    Args:
        plain: transformers' own.
    """

    def __init__(self, plain: Callable[..., Any]) -> None:
        self._plain = plain
        self._thread = threading.get_ident()
        self._made: MutableMapping[torch.Tensor, tuple[int, torch.Tensor]] = WeakTensorKeyDictionary()
        """By mask: how often that was changed, and its numbers. A graph's masks and numbers die with its capture."""

    def forget(self) -> None:
        """Make numbers anew from here on."""
        self._made.clear()

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **others: Any,
    ) -> Any:
        # Among several tokens is padding, which sees nothing: that is left to torch. So are masks that transformers
        # itself makes one with a bias.
        is_one = query.shape[-2] == 1 and others.get("position_bias") is None
        if is_one and _is_boolean(attention_mask) and threading.get_ident() == self._thread:
            attention_mask = self._numbers(attention_mask, query.dtype)
        return self._plain(module, query, key, value, attention_mask, **others)

    def _numbers(self, mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        version = 0 if mask.is_inference() else mask._version
        known = self._made.get(mask)
        if known is None or known[0] != version or known[1].dtype != dtype:
            numbers = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, _HIDDEN)
            known = self._made[mask] = version, numbers
        return known[1]


def _is_boolean(mask: object) -> TypeGuard[torch.Tensor]:
    return isinstance(mask, torch.Tensor) and mask.dtype == torch.bool
