"""Speeds up Triton's interpreter by caching what it recomputes at each operation; results are the same."""

import inspect
import math
from functools import cache
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

_get_np_dtype = interpreter._get_np_dtype
_np_dtype_of = cache(_get_np_dtype)
_patch_lang = interpreter._patch_lang
_broadcast_values = interpreter.TritonSemantic.broadcast_impl_value


def hasten() -> None:
    """For the rest of this process."""
    # Whole numbers are added and multiplied a second time in 64 bits, and what that finds is dropped without `debug`.
    assert not interpreter.interpreter_builder.options.debug
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    interpreter._get_np_dtype = _np_dtype
    interpreter._patch_builtin = _patch_builtin
    interpreter._patch_lang = _patch_lang_once
    tl.block_type.to_ir = lambda self, builder: self
    tl.block_type.with_element_ty = _with_element_type
    tl.tensor.__init__ = _make_tensor
    interpreter.TritonSemantic.broadcast_impl_value = _broadcast


def _np_dtype(dtype: tl.dtype) -> Any:
    return _get_np_dtype(dtype) if dtype.scalar.is_ptr() else _np_dtype_of(dtype.scalar)


@cache
def _builtins_of(package: Any) -> list[tuple[str, Any]]:
    return [(name, member) for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    for name, member in _builtins_of(package):
        interpreter._patch_attr(package, name, member, builder, scope)


@cache
def _languages_of(function: Any) -> list[Any]:
    return [each for each in function.__globals__.values() if each is tl or each is tl.core]


def _patch_lang_once(function: Any) -> Any:
    """Functions that a kernel calls find the language as its launch has patched it."""
    if any(tl.core.is_builtin(language.load) for language in _languages_of(function)):
        return _patch_lang(function)
    return interpreter._LangPatchScope()


def _with_element_type(self: tl.block_type, scalar: tl.dtype) -> tl.block_type:
    """Made once for each type and dtype: nothing writes to a type."""
    if scalar.is_ptr():
        return tl.block_type(scalar, self.shape)
    known = self.__dict__.setdefault("_with", {})
    if scalar.name not in known:
        known[scalar.name] = tl.block_type(scalar, self.shape)
    return known[scalar.name]


def _make_tensor(self: tl.tensor, handle: Any, type: tl.dtype) -> None:
    """Tensors of one type share its shape, to which nothing writes either."""
    if "_shape" not in type.__dict__:
        shape = type.shape if type.is_block() else ()
        type._shape = tl.tuple([tl.constexpr(size) for size in shape]), tl.constexpr(math.prod(shape))
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = type._shape


def _broadcast(self: Any, left: tl.tensor, right: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    shapes = [side.type.shape.values if side.type.is_block() else [] for side in (left, right)]
    return (left, right) if shapes[0] == shapes[1] else _broadcast_values(self, left, right)
