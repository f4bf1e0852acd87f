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


class _NoTokenError(Exception):
    """A pass gave logits of which no token can be chosen."""


def looks_at_logits(kwargs: Mapping[str, Any], config: Any) -> bool:
    """Whether the logits of a `generate` call are to be `choosable`: not where something else sees to those that are
    NaN, transformers' `remove_invalid_values` or a logits processor that chooses itself.

    Args:
        kwargs: of the call.
        config: the generation config by position, or the model's own.
    """
    config = kwargs.get("generation_config") or config

    def asked(name: str) -> bool:
        return bool(kwargs.get(name, getattr(config, name, False)))

    return not asked("remove_invalid_values") and (asked("do_sample") or not kwargs.get("logits_processor"))


def choosable(work: Callable[[], Any], model: nn.Module) -> Callable[[], Any]:
    """The same work, which `checked` and `explained` stop once the model gives logits that are NaN or infinite.

    Drawing from such probabilities kills the process's use of a CUDA device, and the greatest of them is a wrong token.
    What is looked at are the greatest of each row at its last position; a text of the batch waits for its token anyway.
    """

    def look(module: nn.Module, args: Any, output: Any) -> None:
        logits = getattr(output, "logits", None)
        if isinstance(logits, torch.Tensor) and not bool(logits[:, -1].amax(-1).isfinite().all()):
            raise _NoTokenError

    def looking() -> Any:
        handle = model.register_forward_hook(look)
        try:
            return work()
        finally:
            handle.remove()

    return looking


def checked(work: Callable[[], Any], layers: Mapping[str, nn.Module], dtype: torch.dtype) -> Callable[[], Any]:
    """The same work, which raises NonFiniteError where a layer of a model in ``dtype`` gives infinities or NaN."""

    def watched() -> Any:
        watch, found, failure = FiniteWatch(layers), None, None
        watch.start()
        try:
            try:
                found = work()
            except _NoTokenError as error:
                failure = error
            where = watch.where(watch.take())
        finally:
            watch.stop()
        if where is None and failure is not None:
            where = "what comes after the last layer"
        if where is not None:
            raise NonFiniteError(
                f"infinities or NaN come first from {where}: its weights may be damaged, or {dtype} too narrow for "
                "this model; try the dtype that it was trained in, or float32"
            )
        return found

    return watched


def explained(
    work: Callable[[], Any],
    layers: Mapping[str, nn.Module],
    dtype: torch.dtype,
    device: torch.device,
    *,
    repeats: bool,
    second: Callable[[], Any] | None = None,
) -> Callable[[], Any]:
    """The same work, done once more under `checked` where it came to logits of which no token can be chosen.

    Layers are not looked at while all goes well. The second time draws the same tokens.

    Args:
        device: where tokens are drawn.
        repeats: whether doing the work twice is doing it once: nothing that it is given remembers the first time.
        second: the work in a way that layers can be looked at, if the first is in none.
    """

    def again() -> Any:
        on_cuda = device.type == "cuda"
        state, device_state = torch.get_rng_state(), torch.cuda.get_rng_state(device) if on_cuda else None
        try:
            return work()
        except _NoTokenError:
            pass
        if repeats:
            torch.set_rng_state(state)
            if device_state is not None:
                torch.cuda.set_rng_state(device_state, device)
            checked(second or work, layers, dtype)()
        raise NonFiniteError(
            "the model gave logits that are NaN or infinite; set zinfer.check_finite to true to learn which layer gave "
            "the first"
        )

    return again
