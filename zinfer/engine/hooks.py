"""Streams a module tree's weights under its own forward: before a block computes its tensors are put in, after it they
are taken out again.

Between uses a streamed parameter is a `PlaceholderParameter`, so that using it outside the model's forward is an error
instead of another block's bytes. For `state_dict()` blocks are brought one by one, and copied to host memory.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial, wraps
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zinfer.engine.interrupts import deferred, strike
from zinfer.engine.placeholder import PlaceholderParameter
from zinfer.errors import PlanError
from zinfer.graphs.splits import GraphSplits
from zinfer.model.module_patches import ModulePatches
from zinfer.model.partition import ModelBlock
from zinfer.offload.streamer import Streamer
from zinfer.probe.limits import free_host_bytes
from zinfer.quantization.parameter import QuantizedParameter
from zinfer.units import human_bytes

Forward: TypeAlias = Callable[..., Any]


class StreamingHooks:
    """Binds resident blocks for good and streamed ones while their modules run.

    Args:
        model: the module whose forward is one pass. Its forward is wrapped, so that a pass is closed however it ends:
            torch runs no hook after an exception that is no `Exception`.
        blocks: all its blocks; those that ``resident`` lacks are streamed.
        resident: tensors of resident blocks, by block index.
        streamer: moves the others; None when there are none.
        wrap: around the model's own forward.
        cuts: to be told where blocks are streamed; nothing is streamed while they are recorded.
        lock: held while the model runs.

    Attributes:
        passes: forwards of the model so far.
        copying_s: seconds spent on copies for `state_dict()`.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[ModelBlock],
        resident: Mapping[int, Mapping[str, nn.Parameter]],
        streamer: Streamer | None,
        wrap: Callable[[Forward], Forward] | None = None,
        cuts: GraphSplits | None = None,
        lock: AbstractContextManager[bool] | None = None,
    ) -> None:
        self._model = model
        self._lock = lock or threading.RLock()
        self._cuts = cuts
        self._blocks = blocks
        self._streamer = streamer
        self._absent = [absent_tensors(block) for block in blocks]
        # Looked up twice for every block of a pass: the dicts that hold the parameters, without the way to them.
        self._places = [
            [(binding.module._parameters, binding.leaf, binding.tensor) for binding in block.bindings]
            for block in blocks
        ]
        self._patches = ModulePatches()
        self._handles: list[RemovableHandle] = []
        self._in_pass = False
        self._copies: dict[tuple[str, str], torch.Tensor] = {}  # what is left of the block that was read last
        self.passes = 0
        self.copying_s = 0.0
        before = [(held, leaf, held[leaf]) for places in self._places for held, leaf, _ in places]
        try:
            deferred(lambda: self._put_on(resident, wrap))
        except BaseException:  # Ctrl-C: the module is as it was, with its weights if it came with them
            self._take_off()
            for held, leaf, parameter in before:
                held[leaf] = parameter
            raise

    def _put_on(
        self, resident: Mapping[int, Mapping[str, nn.Parameter]], wrap: Callable[[Forward], Forward] | None
    ) -> None:
        model, cuts, streamer = self._model, self._cuts, self._streamer
        self._patches.patch(model, self._one_pass(wrap(model.forward) if wrap else model.forward))
        for block in self._blocks:
            if block.block.index in resident:
                self._bind(block, resident[block.block.index])
            else:
                self._unbind(block)
                for name, absent in self._absent[block.block.index].items():
                    absent.read = partial(self._read, block, name)
                for site in block.sites:
                    self._handles.append(site.register_forward_pre_hook(self._before(block)))
                    self._handles.append(site.register_forward_hook(self._after(block), always_call=True))
                    if cuts is not None and streamer is not None:
                        bind, unbind = partial(self._bind, block), partial(self._unbind, block)
                        self._handles += cuts.add(site, block.block, streamer, bind, unbind)

    def _take_off(self) -> None:
        self._patches.undo()
        for handle in self._handles:
            handle.remove()

    def settle(self) -> None:
        """Take out and release what a call that failed has left in; after one that came to its end there is nothing."""
        if self._streamer is not None:
            self._copies.clear()
            for block in self._streamer.held():
                self._unbind(self._blocks[block.index])
            self._streamer.release_all()

    def remove(self) -> None:
        """Take the hooks off and leave every parameter absent; the slabs may be freed after."""
        self._take_off()
        self._copies.clear()
        for block in self._blocks:
            for absent in self._absent[block.block.index].values():
                absent.read = None
            self._unbind(block)

    def _read(self, block: ModelBlock, name: str) -> torch.Tensor:
        """A copy of a streamed tensor in host memory.

        The others of its block are copied with it and kept for the next calls, which ask for them one after the other.
        """
        with self._lock, torch.no_grad():
            if self._in_pass:
                raise RuntimeError("state_dict() was called from within the model's forward; call it after that")
            if (block.block.name, name) not in self._copies:
                deferred(partial(self._copy, block))
            return self._copies.pop((block.block.name, name))

    def _copy(self, block: ModelBlock) -> None:
        assert self._streamer is not None
        self.settle()
        needed_bytes = sum(tensor.numel * tensor.dtype.itemsize for tensor in block.block.layout.tensors)
        free_bytes = free_host_bytes()
        if needed_bytes > free_bytes:
            raise PlanError(
                f"state_dict: it keeps a copy of each weight in host memory; that of {block.block.name} takes "
                f"{human_bytes(needed_bytes)}, and {human_bytes(free_bytes)} are free. Call state_dict() of one layer "
                "at a time, and let go of each"
            )
        begin_s = time.perf_counter()
        try:
            held = self._streamer.wait(block.block)
            self._copies |= {(block.block.name, name): _copy_of(tensor) for name, tensor in held.items()}
            self._streamer.release(block.block)
        finally:
            self.copying_s += time.perf_counter() - begin_s

    def _one_pass(self, forward: Forward) -> Forward:
        @wraps(forward)
        def one_pass(*args: Any, **kwargs: Any) -> Any:
            if self._in_pass:
                raise RuntimeError(
                    "the model was called from within its own forward (a hook?); its weights are in use there"
                )
            return deferred(partial(self._run_pass, forward, args, kwargs))

        return one_pass

    def _run_pass(self, forward: Forward, args: Any, kwargs: Any) -> Any:
        strike()
        try:
            self._in_pass = True
            self.settle()  # a part of the model that failed, called alone, has left its blocks in
            self.passes += 1
            return forward(*args, **kwargs)
        finally:
            self._in_pass = False
            self.settle()

    def _before(self, block: ModelBlock) -> Callable[[nn.Module, object], None]:
        streamer = self._streamer
        assert streamer is not None, f"block {block.block.name} is not resident and nothing streams it"

        def bring(site: nn.Module, args: object) -> None:
            if self._cuts is None or not self._cuts.is_capturing:
                strike()
                deferred(lambda: self._bind(block, streamer.wait(block.block)))

        return bring

    def _after(self, block: ModelBlock) -> Callable[[nn.Module, object, object], None]:
        streamer = self._streamer
        assert streamer is not None

        def let_go(site: nn.Module, args: object, output: object) -> None:
            if streamer.holds(block.block):  # a wait that failed runs this hook too, and so does what is recorded
                deferred(partial(self._let_go, block, streamer))

        return let_go

    def _let_go(self, block: ModelBlock, streamer: Streamer) -> None:
        self._unbind(block)
        streamer.release(block.block)

    def _unbind(self, block: ModelBlock) -> None:
        self._bind(block, self._absent[block.block.index])

    def _bind(self, block: ModelBlock, tensors: Mapping[str, nn.Parameter]) -> None:
        for parameters, leaf, tensor in self._places[block.block.index]:
            parameters[leaf] = tensors[tensor]


def _copy_of(tensor: torch.Tensor) -> torch.Tensor:
    full = tensor.dequantized() if isinstance(tensor, QuantizedParameter) else tensor.detach()
    return full.to("cpu", copy=True)


def absent_tensors(block: ModelBlock) -> dict[str, PlaceholderParameter]:
    """Stand-ins for the block's tensors, by name."""
    absent: dict[str, PlaceholderParameter] = {}
    for binding in block.bindings:
        parameter = binding.module._parameters[binding.leaf]
        assert parameter is not None
        absent[binding.tensor] = PlaceholderParameter.like(parameter)
    return absent
