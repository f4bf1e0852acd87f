"""Queries and keys turned by their positions, by one kernel where transformers takes ten.

transformers turns them in a function of the family's file that the attention's forward calls by name. So the overlay is
that very forward, compiled no differently, which finds another function under the name.
"""

import functools
import inspect
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any, Final

import torch
from torch import nn

from zinfer.inject.overlay import Overlay, is_near, probe
from zinfer.kernels.rotary import rotate, rotate_ref

_NAME: Final = "apply_rotary_pos_emb"
_KINDS: Final = {"rotation by halves": False, "rotation of neighbours": True}


def overlay_rotation(module: nn.Module) -> Overlay | None:
    """The attention's own forward with a kernel for the rotation; None for a module that calls none that is known."""
    plain = type(module).forward
    if not isinstance(plain, FunctionType) or _NAME not in plain.__code__.co_names:
        return None
    if not callable(original := plain.__globals__.get(_NAME)) or (kind := _kind_of(original)) is None:
        return None
    return Overlay(kind, MethodType(_rewired(plain, original, _KINDS[kind]), module))


@functools.cache
def _kind_of(original: Callable[..., Any]) -> str | None:
    """What a function computes with (queries, keys, cos, sin)."""
    if list(inspect.signature(original).parameters)[:4] != ["q", "k", "cos", "sin"]:
        return None
    generator = torch.Generator().manual_seed(0)
    options: dict[str, Any] = {"generator": generator, "dtype": torch.float32, "device": "cpu"}
    queries, keys = (torch.randn(2, heads, 5, 8, **options) for heads in (3, 1))
    cos, sin = (torch.randn(2, 5, 8, **options) for _ in range(2))
    given = probe(original, queries, keys, cos, sin)
    if not isinstance(given, tuple) or len(given) != 2:
        return None
    for kind, interleaved in _KINDS.items():
        wanted = rotate_ref(queries, keys, cos, sin, interleaved=interleaved)
        if all(is_near(theirs, ours) for ours, theirs in zip(wanted, given, strict=True)):
            return kind
    return None


@functools.cache
def _rewired(plain: FunctionType, original: Callable[..., Any], interleaved: bool) -> FunctionType:
    """The forward of a class, with the kernel where it calls ``original`` on heads that are turned whole."""

    def turned(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        if args or kwargs or q.dim() != 4 or cos.dim() != 3 or cos.shape[-1] != q.shape[-1]:
            return original(q, k, cos, sin, *args, **kwargs)
        return rotate(q, k, cos, sin, interleaved=interleaved)

    names = {**plain.__globals__, _NAME: turned}
    forward = FunctionType(plain.__code__, names, plain.__name__, plain.__defaults__, plain.__closure__)
    forward.__kwdefaults__ = plain.__kwdefaults__
    return forward
