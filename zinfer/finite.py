"""Finds the first layer that gives something which is no finite number: damaged weights and overflow show so."""

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zinfer.errors import NonFiniteError

BEFORE: Final = "what comes before the first layer"


class FiniteWatch:
    """Looks at what goes into the first layer and at what comes out of each, between `start` and `stop`.

    A look reads an activation once on its device, and waits for nothing.

    Args:
        layers: by name, in the model's order.
    """

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        self._layers = dict(layers)
        self._handles: list[RemovableHandle] = []
        self._looks: list[torch.Tensor | None] = [None] * (len(self._layers) + 1)

    @property
    def is_on(self) -> bool:
        return bool(self._handles)

    def start(self) -> None:
        """Look from now on."""
        if self.is_on:
            return
        for place, layer in enumerate(self._layers.values()):
            self._handles.append(layer.register_forward_hook(self._look_after(place + 1)))
            if place == 0:
                self._handles.append(layer.register_forward_pre_hook(self._look_before, with_kwargs=True))

    def stop(self) -> None:
        """Look no more, and forget what was seen."""
        while self._handles:
            self._handles.pop().remove()
        self._looks = [None] * len(self._looks)

    def take(self) -> list[torch.Tensor | None]:
        """What was seen since the last call, for `where`; a pass may go on meanwhile."""
        taken, self._looks = self._looks, [None] * len(self._looks)
        return taken

    def where(self, taken: list[torch.Tensor | None]) -> str | None:
        """The first that gave something not finite, in words; None where all that was seen is. Waits for the device."""
        for name, look in zip([BEFORE, *self._layers], taken, strict=True):
            if look is not None and not bool(look):
                return name
        return None

    def _look_after(self, place: int) -> Any:
        def look(layer: nn.Module, args: Any, output: Any) -> None:
            self._note(place, output[0] if isinstance(output, tuple) else output)

        return look

    def _look_before(self, layer: nn.Module, args: Any, kwargs: Any) -> None:
        self._note(0, args[0] if args else next(iter(kwargs.values())))

    def _note(self, place: int, hidden: torch.Tensor) -> None:
        look, before = torch.isfinite(hidden).all(), self._looks[place]
        self._looks[place] = look if before is None else before & look


def checked(work: Callable[[], Any], layers: Mapping[str, nn.Module], dtype: torch.dtype) -> Callable[[], Any]:
    """The same work, which raises NonFiniteError where a layer of a model in ``dtype`` gives infinities or NaN."""

    def watched() -> Any:
        watch = FiniteWatch(layers)
        watch.start()
        try:
            found = work()
            where = watch.where(watch.take())
        finally:
            watch.stop()
        if where is not None:
            raise NonFiniteError(
                f"infinities or NaN come first from {where}: its weights may be damaged, or {dtype} too narrow for "
                "this model; try the dtype that it was trained in, or float32"
            )
        return found

    return watched
