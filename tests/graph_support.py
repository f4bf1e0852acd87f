"""A stand-in for CUDA graphs on the CPU: records the called operators and kernels, in its own memory.

Like a capture, recording changes no existing tensors, and its results are overwritten with invalid values. A replay
computes them again in the same memory. As in a graph's pool, later recordings reuse memory that the program has freed.
transformers treats it as a capture, in which it reads no values of tensors; operators that would wait for the device
are refused before they get here (`zinfer/graphs/no_sync.py`).
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from transformers.utils import import_utils
from triton.runtime import interpreter

from zinfer.engine import acceleration
from zinfer.graphs.capturer import CudaCapturer
from zinfer.kernels import paged_attention

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


class StandIn(TorchDispatchMode, CudaCapturer):
    """Records on the CPU.

    Attributes:
        order: what was replayed, by the numbers of pieces.
    """

    def __init__(self) -> None:
        super().__init__()
        self._tape: list[Callable[[], object]] | None = None
        self._num_pieces = 0
        self._memory: dict[int, tuple[Bytes, StorageWeakRef]] = {}
        self.order: list[int] = []

    @contextmanager
    def session(self) -> Iterator[None]:
        launch, attend = interpreter.GridExecutor.__call__, paged_attention.padded_attention

        def launched(executor: Any, *args: Any, **kwargs: Any) -> None:
            self._launch(lambda args, kwargs: launch(executor, *args, **kwargs), args, kwargs)

        def attended(query: torch.Tensor, pages: Any, layout: Any, rule: Any) -> torch.Tensor:
            """It reads lengths on the host, as the kernels do not, and keeps what it makes of them with the layout."""
            if self._tape is None:
                return attend(query, pages, layout, rule)
            out = query.new_empty((*query.shape[:2], pages.values.shape[3]))
            place, *args = self._own((out, query, pages, layout, rule))
            self._tape.append(lambda: place.copy_(attend(args[0], args[1], replace(args[2]), args[3])))
            return out

        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(import_utils, "is_cuda_stream_capturing", return_value=True))
            stack.enter_context(mock.patch.object(interpreter.GridExecutor, "__call__", launched))
            stack.enter_context(mock.patch.object(paged_attention, "padded_attention", attended))
            stack.enter_context(self)
            try:
                yield
            finally:
                self._tape = None
        for array, _ in self._memory.values():
            array.fill(255)  # NaN, and no index
        self._memory = {}

    def begin(self) -> None:
        assert self._tape is None, "two pieces at once"
        self._tape = []

    def end(self) -> Callable[[], None]:
        assert self._tape is not None
        tape, self._tape = self._tape, None
        self._num_pieces += 1

        def replay(number: int = self._num_pieces) -> None:
            self.order.append(number)
            for step in tape:
                step()

        return replay

    def unowned(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def close(self) -> None:
        """Nothing is kept."""

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._tape is None:
            return func(*args, **kwargs)
        own = self._own((args, kwargs))
        if func._schema.is_mutable:
            self._tape.append(lambda: func(*own[0], **own[1]))
            return self._undone(lambda: func(*args, **kwargs), (args, kwargs))
        found = func(*args, **kwargs)
        before = {_place(tensor) for tensor in tensors_of((args, kwargs))}
        if all(_place(tensor) in before for tensor in tensors_of(found)):  # views stay views
            return found
        found = pytree.tree_map_only(torch.Tensor, self._placed, found)
        places = tensors_of(self._own(found))
        self._tape.append(lambda: _compute_into(places, func, *own))
        return found

    def _launch(self, kernel: Callable[[Any, Any], object], args: Any, kwargs: Any) -> None:
        if self._tape is None:
            kernel(args, kwargs)
            return
        own = self._own((args, kwargs))
        self._tape.append(lambda: kernel(*own))
        with _disable_current_modes():  # what the interpreter itself does is no part of a forward
            self._undone(lambda: kernel(args, kwargs), (args, kwargs))

    def _placed(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same numbers in memory that outlives whoever holds them."""
        num_bytes = tensor.untyped_storage().nbytes()
        if not num_bytes:
            return tensor
        free = (array for array, user in self._memory.values() if user.expired() and array.nbytes == num_bytes)
        array = next(free, None)
        if array is None:
            array = np.empty(num_bytes, np.uint8)
        placed = _over(array, tensor)
        placed.copy_(tensor)
        self._memory[_place(placed)] = array, StorageWeakRef(placed.untyped_storage())
        return placed

    def _own(self, tree: Any) -> Any:
        """The same with tensors that keep nothing of what the program holds, over the same memory."""
        if is_dataclass(tree) and not isinstance(tree, type):
            return replace(tree, **{field.name: self._own(getattr(tree, field.name)) for field in fields(tree)})
        if isinstance(tree, (tuple, list)) and not hasattr(tree, "_fields"):
            return type(tree)(self._own(each) for each in tree)
        if isinstance(tree, dict):
            return {key: self._own(value) for key, value in tree.items()}
        known = self._memory.get(_place(tree)) if isinstance(tree, torch.Tensor) else None
        return tree if known is None else _over(known[0], tree)

    def _undone(self, compute: Callable[[], Any], taken: Any) -> Any:
        """What it gives, without what it has changed of tensors that were there before."""
        there = [tensor for tensor in tensors_of(taken) if _place(tensor) not in self._memory]
        before = [tensor.clone() for tensor in there]
        found = compute()
        for tensor, value in zip(there, before, strict=True):
            if not torch.equal(tensor, value):
                tensor.copy_(value)
        return found


def _compute_into(places: list[torch.Tensor], func: Any, args: Any, kwargs: Any) -> None:
    for place, tensor in zip(places, tensors_of(func(*args, **kwargs)), strict=True):
        place.copy_(tensor)


def _over(array: Bytes, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that lies in these bytes as the given one in its own."""
    plain = torch.from_numpy(array).view(tensor.dtype)
    return plain.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def tensors_of(given: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, torch.Tensor)]


def assert_in_order() -> None:
    """As where no capture is under way, and none has broken off: of torch on a GPU."""
    assert not torch.cuda.is_current_stream_capturing()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert len(set(torch.rand(3, device="cuda").tolist())) > 1
    torch.cuda.empty_cache()


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """Graphs also on the CPU; on a GPU they stay those of CUDA."""
    found = StandIn()

    def capturer_for(device: torch.device) -> CudaCapturer:
        return CudaCapturer() if device.type == "cuda" else found

    monkeypatch.setattr(acceleration, "capturer_for", capturer_for)
    return found
