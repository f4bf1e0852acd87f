"""Splits captured forwards around blocks whose weights stream, to wait for and release them."""

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from zinfer.graphs.capture import Capture
from zinfer.graphs.form import CannotCapture
from zinfer.offload.block import Block
from zinfer.offload.streamer import Streamer

Bind: TypeAlias = Callable[[Mapping[str, nn.Parameter]], None]


class GraphSplits:
    """The streamed blocks of an engine, as steps of captured forwards.

    A block may be in any slot, so it is captured for each; all captures write their results where the first one does.
    A capture computes nothing, so nothing is streamed for it: it only needs the slots' addresses. Code outside a
    streamed block may use only its module's results.

    Args:
        most_bytes: forwards that stream more are not captured; None: no limit.
    """

    def __init__(self, most_bytes: int | None) -> None:
        self._most_bytes = most_bytes
        self._streamer: Streamer | None = None
        self._capture: Capture | None = None
        self._entered: _Site | None = None

    @property
    def is_capturing(self) -> bool:
        """Whether a forward is being captured."""
        return self._capture is not None

    @property
    def are_any(self) -> bool:
        """Whether anything streams."""
        return self._streamer is not None

    def arrangement(self) -> Hashable:
        """Return which blocks are cached; a capture is valid for one arrangement.

        Raises:
            CannotCapture: blocks are moving into the slots where they stay, or more than ``most_bytes`` stream.
        """
        if self._streamer is None:
            return ()
        cached = self._streamer.cached()
        if cached is None:
            raise CannotCapture("streamed blocks are moving into their cache slots")
        if self._most_bytes is not None and self._streamer.passing_bytes > self._most_bytes:
            raise CannotCapture("forwards stream so much that they wait for the link")
        return cached

    @contextmanager
    def within(self, capture: Capture) -> Iterator[None]:
        """Split what is captured within this context."""
        self._capture = capture
        try:
            yield
        finally:
            self._capture = None
            if self._entered is not None:  # the capture failed inside a block
                self._entered.unbind()
                self._entered = None

    def add(
        self, module: nn.Module, block: Block, streamer: Streamer, bind: Bind, unbind: Callable[[], None]
    ) -> list[RemovableHandle]:
        """Split at the calls of a module. Its own hooks were added before and do nothing while `is_capturing`.

        Args:
            block: streamed, used by the module.
            bind, unbind: put tensors of the block into modules, and remove them.
        """
        self._streamer = streamer
        site = _Site(module, block, bind, unbind)

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            if self._capture is not None:
                self._enter(site, self._capture, streamer)

        def leave(module: nn.Module, args: Any, kwargs: Any, given: Any) -> None:
            if self._capture is not None:
                self._leave(site, self._capture, streamer, (args, kwargs), given)

        # Before all other hooks on the module's result, so that those are captured once, after the block.
        return [
            module.register_forward_pre_hook(enter, with_kwargs=True),
            module.register_forward_hook(leave, with_kwargs=True, prepend=True),
        ]

    def _enter(self, site: "_Site", capture: Capture, streamer: Streamer) -> None:
        if self._entered is not None:
            raise CannotCapture(f"the streamed block {site.block.name} is inside {self._entered.block.name}")
        capture.steps.append(capture.end())
        self._entered = site
        site.bind(streamer.possible_slots(site.block)[0].views(site.block.layout))
        if capture.inside is not None:
            capture.inside.begin()
        capture.begin()

    def _leave(self, site: "_Site", capture: Capture, streamer: Streamer, taken: Any, given: Any) -> None:
        first, *others = streamer.possible_slots(site.block)
        pieces = {first.address: capture.end()}
        if capture.inside is not None and capture.inside.end(given):
            raise CannotCapture(f"an intermediate result of the streamed block {site.block.name} is kept")
        args, kwargs = taken
        for slot in others:
            site.bind(slot.views(site.block.layout))
            capture.begin()
            _put(given, site.module.forward(*args, **kwargs))
            pieces[slot.address] = capture.end()
        site.unbind()
        self._entered = None

        def compute_streamed() -> None:
            # After the wait for the block's copy, and before the event after which its slot may be overwritten.
            streamer.wait(site.block)
            pieces[streamer.slot_of(site.block).address]()
            streamer.release(site.block)

        capture.steps.append(compute_streamed)
        capture.begin()


@dataclass(frozen=True, eq=False)
class _Site:
    """A module that uses a streamed block."""

    module: nn.Module
    block: Block
    bind: Bind
    unbind: Callable[[], None]


def _put(places: Any, given: Any) -> None:
    """Copy a block's results to where the first capture of it put its results."""
    (targets, form), (sources, found) = pytree.tree_flatten(places), pytree.tree_flatten(given)
    if form != found:
        raise CannotCapture("a streamed block returns another structure each time")
    for target, source in zip(targets, sources, strict=True):
        # Inputs of the block, modified or not, are already in place.
        if isinstance(target, torch.Tensor) and target.data_ptr() != source.data_ptr():
            target.copy_(source)
