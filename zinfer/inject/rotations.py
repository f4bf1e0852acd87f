"""Rotary embeddings by one kernel where transformers launches ten.

transformers rotates in a function of the family's file, which the attention's forward calls by name. The overlay is
that forward's code with other globals, in which the name refers to the kernel.
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
    """Return the attention's own forward with a kernel for the rotation; None if the module calls no known rotation."""
    plain = type(module).forward
    if not isinstance(plain, FunctionType) or _NAME not in plain.__code__.co_names:
        return None
    if not callable(original := plain.__globals__.get(_NAME)) or (kind := _kind_of(original)) is None:
        return None
    return Overlay(kind, MethodType(_rewired(plain, original, _KINDS[kind]), module))


@functools.cache
def _kind_of(original: Callable[..., Any]) -> str | None:
    """Return the kind of rotation that a function of (queries, keys, cos, sin) computes; None if none is known."""
    if list(inspect.signature(original).parameters)[:4] != ["q", "k", "cos", "sin"]:
        return None
    queries, keys, cos, sin = _numbers()
    given = probe(original, queries, keys, cos, sin)
    if not isinstance(given, tuple) or len(given) != 2:
        return None
    for kind, interleaved in _KINDS.items():
        wanted = rotate_ref(queries, keys, cos, sin, interleaved=interleaved)
        if all(is_near(theirs, ours) for ours, theirs in zip(wanted, given, strict=True)):
            return kind
    return None


@functools.cache
def _keeps_dtype(original: Callable[..., Any]) -> bool:
    """Return whether half-precision queries keep their dtype with float32 cosines."""
    queries, keys, cos, sin = _numbers()
    given = probe(original, queries.half(), keys.half(), cos, sin)
    return isinstance(given, tuple) and all(each.dtype == torch.float16 for each in given)


def _numbers() -> tuple[torch.Tensor, ...]:
    """Return queries, keys, cos and sin to probe with."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 3, 5, 8), (2, 1, 5, 8), (2, 5, 8), (2, 5, 8))
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") for shape in shapes)


def _rewired(plain: FunctionType, original: Callable[..., Any], interleaved: bool) -> FunctionType:
    """Return a class's forward that calls the kernel instead of ``original`` where whole heads are rotated."""

    def turned(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        is_known = q.dim() == 4 and cos.dim() == 3 and cos.shape[-1] == q.shape[-1]
        if args or kwargs or not is_known or not (cos.dtype == q.dtype or _keeps_dtype(original)):
            return original(q, k, cos, sin, *args, **kwargs)
        return rotate(q, k, cos, sin, interleaved=interleaved)

    names = {**plain.__globals__, _NAME: turned}
    forward = FunctionType(plain.__code__, names, plain.__name__, plain.__defaults__, plain.__closure__)
    forward.__kwdefaults__ = plain.__kwdefaults__
    return forward
