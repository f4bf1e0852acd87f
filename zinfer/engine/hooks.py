"""Streams a module tree's weights with forward hooks: a block's tensors are bound before it computes, unbound after.

Between uses a streamed parameter is a `PlaceholderParameter`, so that using it outside the model's forward is an error
instead of another block's bytes. `state_dict()` loads blocks one by one and copies them to host memory.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial, wraps
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zinfer.engine.interrupts import deferred, deliver_pending
from zinfer.engine.placeholder import PlaceholderParameter
from zinfer.errors import PlanError
from zinfer.graphs.splits import GraphSplits
from zinfer.model.module_patches import ModulePatches
from zinfer.model.partition import ModelBlock
from zinfer.offload.streamer import Streamer
from zinfer.probe.cgroups import free_host_bytes
from zinfer.units import human_bytes
from zinfer.weights.parameter import QuantizedParameter

Forward: TypeAlias = Callable[..., Any]


class StreamingHooks:
    """Binds resident blocks once, and streamed blocks while their modules run.

    Args:
        model: the module whose forward is one pass. Its forward is wrapped to clean up after any exception: torch
            runs no hooks after a BaseException such as KeyboardInterrupt.
        blocks: all its blocks; those that ``resident`` lacks are streamed.
        resident: tensors of resident blocks, by block index.
        streamer: streams the other blocks; None if there are none.
        wrap: wraps the model's own forward.
        cuts: splits graphs at streamed blocks; nothing is streamed during capture.
        lock: held while the model runs.
        check: called before each pass; raises if it cannot be computed.
        note_step: called before each block.
        agree: called with a block's name before `state_dict()` copies it; raises if other ranks, whose parts that
            needs, do not copy it too.

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
        check: Callable[[], None] | None = None,
        note_step: Callable[[], None] | None = None,
        agree: Callable[[str], None] | None = None,
    ) -> None:
        self._model = model
        self._check, self._agree = check, agree
        self._lock = lock or threading.RLock()
        self._cuts = cuts
        self._blocks = blocks
        self._streamer = streamer
        self._placeholders = [make_placeholders(block) for block in blocks]
        # The dicts that hold the parameters: used twice per block and pass, so they save attribute look-ups.
        self._places = [
            [(binding.module._parameters, binding.leaf, binding.tensor) for binding in block.bindings]
            for block in blocks
        ]
        self._patches = ModulePatches()
        self._handles: list[RemovableHandle] = []
        self._in_pass = False
        self._kept: set[int] = set()  # blocks that stay bound
        self._copies: dict[tuple[str, str], torch.Tensor] = {}  # of the last block read, still to be asked for
        self.passes = 0
        self.copying_s = 0.0
        before = [(held, leaf, held[leaf]) for places in self._places for held, leaf, _ in places]
        try:
            deferred(lambda: self._put_on(resident, wrap, note_step))
        except BaseException:  # Ctrl-C: restore the module and its parameters
            self._take_off()
            for held, leaf, parameter in before:
                held[leaf] = parameter
            raise

    def _put_on(
        self,
        resident: Mapping[int, Mapping[str, nn.Parameter]],
        wrap: Callable[[Forward], Forward] | None,
        note_step: Callable[[], None] | None,
    ) -> None:
        model, cuts, streamer = self._model, self._cuts, self._streamer
        self._patches.patch(model, self._one_pass(wrap(model.forward) if wrap else model.forward))
        for block in self._blocks:
            if note_step is not None:
                self._handles += [site.register_forward_pre_hook(lambda *_: note_step()) for site in block.sites]
            if block.block.index in resident:
                self._bind(block, resident[block.block.index])
            else:
                self._unbind(block)
                for name, placeholder in self._placeholders[block.block.index].items():
                    placeholder.read = partial(self._read, block, name)
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
        """Unbind and release the blocks that a failed call still holds; after a successful call there are none."""
        if self._streamer is not None:
            self._copies.clear()
            for block in self._streamer.held():
                if block.index not in self._kept:
                    self._unbind(self._blocks[block.index])
            self._streamer.release_all(self._kept)

    @contextmanager
    def keeping(self, module: nn.Module) -> Iterator[None]:
        """Keep the block of a module bound from its next use on, so that several uses stream it once."""
        inside = set(module.modules())
        blocks = [each for each in self._blocks if any(binding.module in inside for binding in each.bindings)]
        self._kept |= {each.block.index for each in blocks}
        try:
            yield
        finally:
            self._kept.clear()
            self.settle()

    def remove(self) -> None:
        """Remove the hooks and replace every parameter by its placeholder; the slabs may be freed after."""
        self._take_off()
        self._copies.clear()
        for block in self._blocks:
            for placeholder in self._placeholders[block.block.index].values():
                placeholder.read = None
            self._unbind(block)

    def _read(self, block: ModelBlock, name: str) -> torch.Tensor:
        """Return a copy of a streamed tensor in host memory.

        The rest of its block is copied too and kept for the next calls, which usually ask for it.
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
                "at a time, and drop each"
            )
        if self._agree is not None:
            self._agree(block.block.name)
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
                    "the model was called from within its own forward (a hook?), while its weights are in use"
                )
            return deferred(partial(self._run_pass, forward, args, kwargs))

        return one_pass

    def _run_pass(self, forward: Forward, args: Any, kwargs: Any) -> Any:
        deliver_pending()
        try:
            self._in_pass = True
            self.settle()  # a submodule that was called alone and failed may still hold blocks
            if self._check is not None:
                self._check()
            self.passes += 1
            return forward(*args, **kwargs)
        finally:
            self._in_pass = False
            self.settle()

    def _before(self, block: ModelBlock) -> Callable[[nn.Module, object], None]:
        streamer = self._streamer
        assert streamer is not None, f"block {block.block.name} is not resident and nothing streams it"

        def load_block(site: nn.Module, args: object) -> None:
            is_kept = block.block.index in self._kept and streamer.holds(block.block)
            if not is_kept and (self._cuts is None or not self._cuts.is_capturing):
                deliver_pending()
                deferred(lambda: self._bind(block, streamer.wait(block.block)))

        return load_block

    def _after(self, block: ModelBlock) -> Callable[[nn.Module, object, object], None]:
        streamer = self._streamer
        assert streamer is not None

        def release_block(site: nn.Module, args: object, output: object) -> None:
            is_kept = block.block.index in self._kept
            if not is_kept and streamer.holds(block.block):  # not after a failed wait, nor during capture
                deferred(partial(self._release, block, streamer))

        return release_block

    def _release(self, block: ModelBlock, streamer: Streamer) -> None:
        self._unbind(block)
        streamer.release(block.block)

    def _unbind(self, block: ModelBlock) -> None:
        self._bind(block, self._placeholders[block.block.index])

    def _bind(self, block: ModelBlock, tensors: Mapping[str, nn.Parameter]) -> None:
        for parameters, leaf, tensor in self._places[block.block.index]:
            parameters[leaf] = tensors[tensor]


def _copy_of(tensor: torch.Tensor) -> torch.Tensor:
    full = tensor.dequantized() if isinstance(tensor, QuantizedParameter) else tensor.detach()
    return full.to("cpu", copy=True)


def make_placeholders(block: ModelBlock) -> dict[str, PlaceholderParameter]:
    """Return placeholders for the block's tensors, by name."""
    placeholders: dict[str, PlaceholderParameter] = {}
    for binding in block.bindings:
        parameter = binding.module._parameters[binding.leaf]
        assert parameter is not None
        placeholders[binding.tensor] = PlaceholderParameter.like(parameter)
    return placeholders
